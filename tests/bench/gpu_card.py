# SPDX-License-Identifier: Apache-2.0
"""What the GPU holds and does by itself, beside the programs of gpu_bench.py."""
import subprocess
import threading


def card_used():
    """Bytes in use on GPU 0 by all programs; None without a GPU."""
    try:
        text = subprocess.run(
            ["nvidia-smi", "--id=0", "--query-gpu=memory.used",
             "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True).stdout
        return int(text.split()[0]) << 20
    except (OSError, ValueError, IndexError, subprocess.CalledProcessError):
        return None


class Watch:
    """The most memory in use on the card over what was used before."""

    def __init__(self, wanted):
        self.before = card_used() if wanted else None
        self.most = self.before
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)
        if self.before is not None:
            self.thread.start()

    def look(self):
        while not self.stop.wait(0.5):
            used = card_used()
            if used is not None:
                self.most = max(self.most, used)

    def end(self):
        if self.before is None:
            return None
        self.stop.set()
        self.thread.join()
        return self.most - self.before


def measure(python):
    """TFLOP/s of an 8192^3 bf16 product and TB/s read and written of a copy of
    2 GiB; None, None without PyTorch or a GPU."""
    code = """
import torch
def median_ms(f):
    times = []
    for i in range(60):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            f()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 5)
    return sorted(times[20:])[20]
n = 8192
a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
        for _ in range(2))
c = torch.empty_like(a)
mm = 2 * n ** 3 / median_ms(lambda: torch.matmul(a, b, out=c)) * 1e-9
x = torch.zeros(2 << 30, device="cuda", dtype=torch.uint8)
y = torch.empty_like(x)
print(mm, 2 * x.numel() / median_ms(lambda: y.copy_(x)) * 1e-9)
"""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        return None, None
    return tuple(map(float, done.stdout.split()))
