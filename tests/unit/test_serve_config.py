"""``warmroot config`` and what ``warmroot deploy`` reads of a cluster's answers."""

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from warmroot.cluster.application_args import read_models
from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.errors import ConfigError
from warmroot.cluster.messages import StartupNote
from warmroot.deploy.cli import main
from warmroot.deploy.serve_config import serve_config
from warmroot.deploy.submit import notes_of, submit, why_failed


def test_the_command_prints_what_serve_and_the_builder_read(capsys):
    assert main(["config", "smollm2", "--num-replicas", "2", "--root-path", "/llm", "--name", "small"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    ServeDeploySchema.model_validate(config)
    [application] = config["applications"]
    assert (application["name"], application["route_prefix"]) == ("small", "/llm")
    assert config["http_options"] == {"host": "0.0.0.0", "port": 8000}
    [read] = read_models(application["args"], {})
    assert read == WarmrootConfig.of("smollm2", root_path="/llm")
    assert application["deployments"] == [
        {"name": "Ingress", "num_replicas": 1},
        {"name": "Replica", "num_replicas": 2},
    ]


def test_the_address_of_the_endpoint_is_an_option_of_the_cluster():
    config = serve_config(WarmrootConfig.of("x", host="10.0.0.1", port=9000))
    assert config["http_options"] == {"host": "10.0.0.1", "port": 9000}
    assert config["applications"][0]["args"] == {"model": "x"}


def test_ingresses_are_told_whether_they_are_several_and_not_how_many():
    def of(ingresses: int):
        [application] = serve_config(WarmrootConfig.of("x", num_ingress=ingresses))["applications"]
        return application

    one, two, five = of(1), of(2), of(5)
    assert one["args"] == {"model": "x"}
    assert two["args"] == five["args"] == {"model": "x", "num_ingress": 2}
    assert [one["deployments"][0]["num_replicas"] for one in (one, two, five)] == [1, 2, 5]


@pytest.mark.parametrize("command", ["config", "deploy"])
def test_secrets_are_refused_in_one_line(command, capsys):
    assert main([command, "x", "--api-key", "hidden"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"warmroot {command}: api_key: the cluster would show it")
    assert "hidden" not in error


def test_no_cluster_at_the_address():
    with pytest.raises(ConfigError, match=r"no Ray dashboard answers at 'http://127\.0\.0\.1:9'"):
        submit(serve_config(WarmrootConfig.of("x")), "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="such as http://head:8265"):
        submit(serve_config(WarmrootConfig.of("x")), "head:8265")


APPLICATION = {
    "message": "",
    "deployments": {
        "Ingress": {"message": "", "replicas": [{"replica_id": "i", "state": "RUNNING"}]},
        "Replica": {
            "message": "The deployment failed.\nTraceback:\nwarmroot.cluster.errors.ModelLoadError: no such folder\n",
            "replicas": [{"replica_id": "a", "state": "RUNNING"}, {"replica_id": "b", "state": "STARTING"}],
        },
    },
}


def test_replicas_are_shown_as_serve_tells_of_them():
    assert notes_of(APPLICATION) == {"a": StartupNote(stage="ready"), "b": StartupNote(stage="starting")}


def test_a_failure_is_told_by_its_last_line():
    assert why_failed(APPLICATION) == "warmroot.cluster.errors.ModelLoadError: no such folder"
    assert why_failed({"message": "", "deployments": {}}) == "no reason given"
