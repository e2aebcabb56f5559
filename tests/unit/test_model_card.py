"""What is told of a model before there is any replica of it."""

import subprocess
import sys

import pytest

from warmroot.actors.model_card import read_card
from warmroot.cluster.config import WarmrootConfig
from warmroot.router.tokenizer import Tokenizer

pytestmark = pytest.mark.model
PROGRAM = """
import sys
from warmroot.actors.model_card import read_card
from warmroot.cluster.config import WarmrootConfig
read_card(WarmrootConfig.of("smollm2"), "token")
print(sorted({"torch", "ray", "transformers"} & set(sys.modules)))
"""


def test_it_is_read_without_loading_anything():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_it_has_all_that_a_client_needs():
    config = WarmrootConfig.of("smollm2", served_model_name=["a", "b"], max_model_len=777, max_num_queued_reqs=5)
    card = read_card(config, "secret")
    assert (card.model, card.names, card.token) == ("a", ("a", "b"), "secret")
    assert (card.max_model_len, card.vocab_size, card.max_num_queued_reqs) == (777, 49152, 5)
    tokenizer = Tokenizer.from_dict(card.tokenizer)
    assert tokenizer.decode(tokenizer.encode("Warm roots")) == "Warm roots"


def test_where_no_replica_is_usual_requests_wait_as_long_as_one_may_take_to_start():
    def timeout(**keys):
        return read_card(WarmrootConfig.of("smollm2", **keys), "").limits["no_replica_timeout"]

    assert timeout() == timeout(max_replicas=2) == 60.0
    assert timeout(max_replicas=2, min_replicas=0) == 1800.0
    assert timeout(max_replicas=2, min_replicas=0, no_replica_timeout=7.0) == 7.0
