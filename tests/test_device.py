import os
import subprocess
import sys

import pytest

# Everything of a process group gets SIGTERM, as from `timeout` or a scheduler, while workers compile.
COMPILES_ON = """
import operator, os, signal, time
from torch._inductor.async_compile import AsyncCompile
from flashtrain.device import start_compile_workers

start_compile_workers()
pool = AsyncCompile.process_pool()
assert pool.submit(operator.add, 1, 2).result(timeout=60) == 3
signal.signal(signal.SIGTERM, lambda *_: print("heard"))
under_way = pool.submit(time.sleep, 1)
os.killpg(0, signal.SIGTERM)
under_way.result(timeout=60)
print(pool.submit(operator.add, 3, 4).result(timeout=60), pool.process.pid)
"""


def test_compile_workers_outlive_a_sigterm_to_all_processes_and_end_with_theirs():
    command = [sys.executable, "-c", COMPILES_ON]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, start_new_session=True)
    assert ended.returncode == 0, ended.stderr
    heard, result, pid = ended.stdout.split()
    assert (heard, result) == ("heard", "7")
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
