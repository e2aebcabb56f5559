"""One end of a gang's control plane as a process of its own: ``parallel_plan_peer.py leader|rank ARGUMENT...``."""

import sys
import time

from warmroot.actors.engine.plan import SequenceResult, StepPlan, StepResult
from warmroot.actors.parallel.plan_receiver import PlanReceiver
from warmroot.actors.parallel.plan_sender import PlanSender
from warmroot.cluster.errors import RankLostError

TOKEN = "secret"


def leader(num_ranks: str) -> None:
    """Print the addresses, send one plan, and wait to be killed."""
    sender = PlanSender(int(num_ranks), TOKEN)
    print(*sender.addresses, flush=True)
    sender.accept(60.0)
    sender.send(StepPlan(step=1))
    time.sleep(600.0)


def rank(number: str, *addresses: str) -> None:
    """Answer every plan. End with 0 when no further plan will come, with 3 when the leader is lost."""
    receiver = PlanReceiver(addresses, TOKEN, int(number), connect_s=60.0)
    try:
        while (delivery := receiver.receive()) is not None:
            answer = SequenceResult(request_id="a", token_ids=[delivery.plan.step])
            receiver.reply(StepResult(step=delivery.plan.step, sequences=[answer]))
            print(delivery.plan.step, flush=True)
    except RankLostError as error:
        print(error.message, flush=True)
        sys.exit(3)
    finally:
        receiver.close()


if __name__ == "__main__":
    {"leader": leader, "rank": rank}[sys.argv[1]](*sys.argv[2:])
