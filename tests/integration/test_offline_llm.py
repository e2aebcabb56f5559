"""``LLM``: a model folder in, texts out, without Ray."""

import json
import subprocess
import sys

import pytest
import small_tokenizers
import torch
import transformers

from warmroot import LLM, SamplingParams
from warmroot.cluster.errors import ConfigError, ContextTooLongError, EngineError, InvalidRequestError, ModelLoadError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = ["hello world", "the end", "stop the world", "hello", "abc def " * 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random Llama with a tokenizer and a chat template."""
    return write_model(tmp_path_factory.mktemp("llm"), transformers.LlamaConfig)


@pytest.fixture(scope="module")
def sparse_folder(tmp_path_factory):
    """A small random mixture of eight experts."""
    return write_model(tmp_path_factory.mktemp("sparse"), transformers.MixtralConfig, num_local_experts=8)


def write_model(folder, kind, **more):
    tokenizer = small_tokenizers.byte_level()
    torch.manual_seed(1)
    config = kind(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
        **more,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    card = tokenizer.to_dict()
    (folder / "tokenizer.json").write_text(card["tokenizer"])
    names = {**tokenizer.special_tokens, "chat_template": small_tokenizers.CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return str(folder)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, dtype="float32", num_kv_blocks=200, max_num_seqs=4, seed=7) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_outputs_in_order_equal_transformers(llm, reference):
    outputs = llm.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = llm.frontend.tokenize(prompt)
        assert output.prompt_token_ids == ids
        expected = reference.generate(torch.tensor([ids]), do_sample=False, min_new_tokens=8, max_new_tokens=8)
        (completion,) = output.completions
        # transformers' min_new_tokens masks the end token, ours is ignored: the same unless it is the likeliest.
        assert completion.token_ids == expected[0, len(ids) :].tolist()
        assert output.text == llm.frontend.tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == "length"
    again = llm.generate(PROMPTS, GREEDY)
    assert [output.text for output in again] == [output.text for output in outputs]
    assert again[-1].cached_tokens > 16


def test_one_prompt_token_ids_and_params_for_each(llm):
    (alone,) = llm.generate("hello", GREEDY)
    ids = llm.frontend.tokenize("hello")
    (by_ids,) = llm.generate(ids, GREEDY)
    assert by_ids.completions == alone.completions
    short, long = llm.generate([ids, "hello"], [SamplingParams(temperature=0.0, max_tokens=2), GREEDY])
    assert short.completions[0].token_ids == alone.completions[0].token_ids[:2]
    assert long.completions == alone.completions
    assert llm.generate([], GREEDY) == []


def test_more_prompts_than_run_at_once(llm):
    outputs = llm.generate([f"hello {n}" for n in range(60)], GREEDY)
    assert [len(output.completions[0].token_ids) for output in outputs] == [8] * 60


def test_choices_and_logprobs(llm):
    params = SamplingParams(max_tokens=6, n=3, logprobs=2, seed=5, ignore_eos=True)
    (output,) = llm.generate("hello", params)
    assert [completion.index for completion in output.completions] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.completions}) > 1
    for completion in output.completions:
        assert [entry.token_id for entry in completion.logprobs] == completion.token_ids
        assert all(len(entry.top) == 2 for entry in completion.logprobs)


def test_chat_follows_the_template(llm):
    conversation = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(conversation, GREEDY)
    assert output.prompt_token_ids == llm.frontend.tokenize(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    both = llm.chat([conversation, [*conversation, {"role": "user", "content": "stop"}]], GREEDY)
    assert both[0].text == output.text and len(both[1].prompt_token_ids) > len(output.prompt_token_ids)


def test_seed_makes_runs_repeatable(folder):
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def texts(seed: int | None) -> list[str]:
        with LLM(folder, dtype="float32", num_kv_blocks=100, seed=seed) as llm:
            return [output.text for output in llm.generate(PROMPTS, params)]

    assert texts(3) == texts(3) != texts(4)
    assert texts(None) != texts(None)


def test_a_bad_prompt_stops_the_batch_and_nothing_more(llm):
    endless = SamplingParams(temperature=0.0, ignore_eos=True)
    with pytest.raises(ContextTooLongError):
        llm.generate(["hello", "x" * 300], endless)
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        llm.generate([[1, 2, 100_000]], GREEDY)
    with pytest.raises(InvalidRequestError, match="1 sampling params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    assert len(llm.generate(["hello"], GREEDY)[0].completions[0].token_ids) == 8


@pytest.mark.parametrize("keys", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_a_model_cut_over_processes_says_the_same(folder, llm, keys):
    whole = [output.completions[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    with LLM(folder, dtype="float32", num_kv_blocks=200, max_num_seqs=4, num_threads=2, **keys) as gang:
        assert [output.completions[0].token_ids for output in gang.generate(PROMPTS, GREEDY)] == whole


@pytest.mark.parametrize("size", [2, 4])
def test_experts_spread_over_processes_say_the_same(sparse_folder, size):
    with LLM(sparse_folder, dtype="float32", num_kv_blocks=200, max_num_seqs=4) as llm:
        whole = [output.completions[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    keys = {"enable_expert_parallel": True, "expert_parallel_size": size, "num_redundant_experts": 4}
    with LLM(sparse_folder, dtype="float32", num_kv_blocks=200, max_num_seqs=4, num_threads=size, **keys) as gang:
        assert [output.completions[0].token_ids for output in gang.generate(PROMPTS, GREEDY)] == whole


def test_impossible_cuts_are_refused_before_a_process_starts(folder):
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: 3 ranks.*1, 2, 4 fit"):
        LLM(folder, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size: 3 stages .* at most 2 fit"):
        LLM(folder, pipeline_parallel_size=3)
    with pytest.raises(ConfigError, match="has no experts"):
        LLM(folder, tensor_parallel_size=2, enable_expert_parallel=True)


def test_wrong_settings(folder):
    with pytest.raises(ConfigError, match="max_num_seq"):
        LLM(folder, max_num_seq=3)
    with pytest.raises(ConfigError, match="port: does not apply"):
        LLM(folder, port=8000)
    with pytest.raises(ModelLoadError):
        LLM("/nowhere/at/all")
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(folder, max_model_len=10_000)


def test_closed(folder):
    llm = LLM(folder, dtype="float32", num_kv_blocks=20)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("hello", GREEDY)


def test_needs_no_ray(folder):
    program = (
        "import sys, warmroot\n"
        f"with warmroot.LLM({folder!r}, num_kv_blocks=50) as llm:\n"
        "    llm.generate('hello', warmroot.SamplingParams(max_tokens=2))\n"
        "assert 'ray' not in sys.modules\n"
        "sys.stderr.write('done')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=120)
    # No bars where nobody watches.
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "done")
