import subprocess
import sys

CODE = """
import threading
import mlx_paged_attention
import mlx.core as mx
from mlx_paged_attention.ops.host_memory import reserve

done = threading.Event()

def others():
    while not done.is_set():
        x = mx.random.normal((64, 64))
        mx.eval(x @ x)
        del x
        mx.clear_cache()

thread = threading.Thread(target=others)
thread.start()
for _ in range(400):
    array, view = reserve((3, 5))
    view[:] = 7
    assert float(mx.sum(array)) == 105
done.set()
thread.join()
print("done")
"""


def test_reserving_and_emptying_mlxs_cache_in_two_threads_do_not_wait_for_each_other():
    result = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100, check=False
    )
    assert result.stdout == "done\n", result.stderr
