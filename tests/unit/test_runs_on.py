"""The line that says what computes."""

from warmroot.deploy.runs_on import WITHOUT_NATIVE, runs_on

NATIVE = {"kernels": "avx512", "weights_format": "q4_1+q8_0", "kv_format": "fp16", "num_threads": 1}
TORCH = NATIVE | {"kernels": "torch (no native kernels: they were not built)", "num_threads": 2}


def test_replicas_that_are_alike_share_a_line():
    assert runs_on([NATIVE, NATIVE]) == ["avx512 kernels, q4_1+q8_0 weights, fp16 KV, 1 thread a replica"]
    assert runs_on([]) == []


def test_missing_kernels_are_explained_once():
    native, torch, advice = runs_on([NATIVE, TORCH, TORCH])
    assert native.startswith("1 x avx512 kernels, ")
    assert torch.startswith("2 x torch (no native kernels: they were not built), ")
    assert torch.endswith(" 2 threads a replica")
    assert advice == WITHOUT_NATIVE
