"""A gang of Ray actors, in a Ray of its own: placed, at work, and gone with the first rank that is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

PROGRAM = Path(__file__).with_name("gang_on_ray.py")


@pytest.mark.cluster
def test_a_gang_of_actors(tmp_path):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)], text=True, capture_output=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    unplaced, loss = json.loads(done.stdout.splitlines()[-1])
    assert unplaced.startswith("the gang cannot be placed: stage 0 needs a node with 1000 CPU, and there is none")
    assert loss.startswith("rank 1 ")
