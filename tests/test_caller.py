"""What recording does on the thread that makes the calls: it copies, and nothing else."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, json, sys, threading
import trackway

seen = {}
watching = False
me = threading.get_ident()

class Tokenizer:
    def __len__(self):
        return 100_000

    def decode(self, ids, **_):
        sys.audit("decoded")
        return " ".join(map(str, ids))

def watch(event, details):
    place = "caller" if threading.get_ident() == me else "other"
    if watching or place == "other":
        seen.setdefault(place, {}).setdefault(event, 0)
        seen[place][event] += 1

sys.addaudithook(watch)
trackway.configure(store=sys.argv[1], sync="off", token2text=True, tokenizer=Tokenizer())

@trackway.llm_trace
async def generate(prompt_ids, messages):
    await asyncio.sleep(0)
    return {"token_ids": list(range(100)), "logprobs": [0.5] * 100, "text": "and so on " * 1000}

@trackway.tool_trace
async def tool(query):
    if query == 3:
        raise ValueError("no")
    return {"found": "nothing" * 100}

@trackway.rollout_trace
async def run(sample):
    messages = []
    for turn in range(5):
        messages.append({"role": "user", "content": f"see https://me:secret@example.org {turn} " * 100})
        await generate(list(range(32_000)), messages)
        try:
            await tool(turn)
        except ValueError:
            pass
    trackway.reward("score", 1.0)
    trackway.annotate(note="done")

async def main(samples):
    async def one(sample):
        with trackway.trajectory(step=1, sample_index=sample):
            await run(sample)
    await asyncio.gather(*map(one, samples))

asyncio.run(main(range(2)))  # what is imported at first use
loop = asyncio.new_event_loop()
watching = True
loop.run_until_complete(main(range(2, 12)))
watching = False
trackway.flush()
print(json.dumps(seen))
"""


def test_the_caller_opens_no_file_imports_nothing_and_decodes_nothing(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store")], capture_output=True, text=True, check=True
    )
    seen = json.loads(result.stdout)
    # The other thread shows that the events are seen at all.
    assert seen["other"]["decoded"] > 10
    assert seen["other"]["open"] > 0
    slow = ("open", "import", "compile", "exec", "decoded")
    groups = ("os.", "fcntl.", "socket.", "sqlite3.", "subprocess.", "shutil.", "time.sleep")
    assert not [event for event in seen["caller"] if event in slow or event.startswith(groups)]


COSTS = """
import json, sys, time
import trackway

trackway.configure(store=sys.argv[1], sync="off", max_queue_bytes=2**40)

@trackway.llm_trace
def generate(prompt_ids):
    return None

@trackway.llm_trace
def chat(text):
    return None

def cost(call, value):
    times = []
    for _ in range(15):
        started = time.thread_time_ns()
        call(value)
        times.append(time.thread_time_ns() - started)
        trackway.flush(30)
    return min(times)

ids = [[1_000 + number for number in range(count)] for count in (8_000, 32_000, 128_000)]
texts = [{"content": "x" * size} for size in (2**18, 2**20, 2**22)]
with trackway.trajectory(step=1, sample_index=1):
    print(json.dumps([[cost(generate, value) for value in ids], [cost(chat, value) for value in texts]]))
"""


@pytest.mark.slow
def test_a_snapshot_costs_in_proportion_to_what_is_copied(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", COSTS, str(tmp_path / "store")], capture_output=True, text=True, check=True
    )
    for costs in json.loads(result.stdout):
        # Sixteen times as much to copy, which no longer fits into a processor's caches.
        assert costs[-1] < 16 * 3 * costs[0], costs
