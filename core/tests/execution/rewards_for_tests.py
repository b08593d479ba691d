"""Rewards that misbehave in every way; their files are loaded by path."""

from __future__ import annotations

from pathlib import Path

from posttune.config.base import RewardRef
from posttune.facade import Rewards, build_rewards
from posttune.types import Sample

CODE = """
import asyncio, json, os, sys, threading, time

def _act(response):
    word, _, rest = response.partition(":")
    if word == "hang":
        time.sleep(1000)
    if word == "raise":
        raise ValueError("bad gold")
    if word == "die":
        os._exit(7)
    if word == "memory":
        return float(len(bytearray(1 << 32)))
    if word == "print":
        print("noise", flush=True)
        sys.stdout.write("more" * 1000)
        return 1.0
    if word == "exit":
        sys.exit(3)
    if word == "pid":
        return float(os.getpid())
    if word == "main":
        return float("ORIGINAL_MAIN" in vars(sys.modules["__main__"]))
    if word == "child":
        import subprocess
        child = subprocess.Popen(["sleep", "1000"])
        open(rest, "w").write(str(child.pid))
        time.sleep(1000)
    if word == "thread":
        return float(threading.current_thread() is threading.main_thread())
    return {"none": None, "nan": float("nan"), "text": "good", "true": True}.get(word, 1.0)

def sync(response):
    return _act(response)

async def later(response):
    if response == "hang":
        await asyncio.sleep(1000)
    await asyncio.sleep(0.001)
    return _act(response)

def whole(samples):
    return [_act(sample.response) for sample in samples]

def slow(response, log):
    began = time.monotonic()
    time.sleep(0.2)
    open(log, "a").write(json.dumps([began, time.monotonic()]) + "\\n")
    return 1.0

async def slow_later(response, log):
    began = time.monotonic()
    await asyncio.sleep(0.2)
    open(log, "a").write(json.dumps([began, time.monotonic()]) + "\\n")
    return 1.0

def counted(response, level=0):
    path = os.path.join(os.path.dirname(__file__), "calls")
    open(path, "a").write(response + "\\n")
    return len(response) + level
"""


def write(folder: Path) -> Path:
    """The file of rewards."""
    path = folder / "odd_rewards.py"
    path.write_text(CODE)
    return path


def made(folder: Path, function: str = "sync", **execution: object) -> Rewards:
    """One reward, labelled ``odd``, with the given execution."""
    path = write(folder)
    ref = RewardRef(name="function", label="odd", options={"path": f"{path}:{function}"}, **execution)
    return build_rewards([ref])


def samples(*responses: str, **columns: object) -> list[Sample]:
    """One sample a response, with ids s0, s1, …"""
    return [Sample(f"s{i}", 0, "p", response, columns=columns) for i, response in enumerate(responses)]
