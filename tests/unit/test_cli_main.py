"""The command itself: dispatch, exit codes, one-line errors."""

import subprocess
import sys

import pytest

from warmroot.cluster.errors import EngineError, ModelLoadError
from warmroot.deploy.cli import COMMANDS, main, serve


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == "warmroot 0.1.0\n"


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_help_lists_every_command(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 0
    help_text = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in help_text] == []


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_each_command_needs_neither_ray_nor_torch(command):
    code = (
        "import sys\nfrom warmroot.deploy.cli import main\n"
        f"try: main(['{command}', '--help'])\nexcept SystemExit: pass\n"
        "print({'torch', 'ray'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith(f"usage: warmroot {command}")
    assert run.stdout.endswith("set()\n")


def test_unknown_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["srve"])
    assert caught.value.code == 2
    assert "'srve'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve"], "warmroot serve: model: missing; name a folder, GGUF file, hub id or smollm2\n"),
        (["serve", "x", "--max-num-seqs", "0"], "--max-num-seqs: should be greater than or equal to 1, not 0\n"),
        (["serve", "x", "--config", "none.yaml"], "warmroot serve: none.yaml: No such file or directory\n"),
        (
            ["bench", "engin"],
            "warmroot bench: 'engin' is not one of engine, curves, overhead, routing, router, kv, weights, speculative,"
            " parallel, overload, autoscaling; did you mean engine?\n",
        ),
    ],
)
def test_user_errors_are_one_line_and_code_2(argv, message, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.endswith(message)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        (ModelLoadError("no such model"), 2, "warmroot serve: no such model\n"),
        (EngineError("it broke"), 1, "warmroot serve: it broke\n"),
        (RuntimeError("oops"), 1, "warmroot serve: unexpected RuntimeError: oops. WARMROOT_DEBUG=1 shows where.\n"),
    ],
)
def test_exit_codes(error, code, message, monkeypatch, capsys):
    def fail(argv):
        raise error

    monkeypatch.delenv("WARMROOT_DEBUG", raising=False)
    monkeypatch.setattr(serve, "main", fail)
    assert main(["serve"]) == code
    assert capsys.readouterr().err == message


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("WARMROOT_DEBUG", "1")
    with pytest.raises(Exception, match="model: missing"):
        main(["serve"])


def test_a_reader_that_leaves_is_no_error():
    code = "import sys; from warmroot.deploy.cli import main; sys.exit(main(['bench', '--help']))"
    process = subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait() == 141
