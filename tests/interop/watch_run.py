"""Trains a model under `reshard watch` and kills both again and again.

usage: watch_run.py RESHARD [--by torch|transformers] [--kills N] [--trainer-kills N] [--steps N] [--seed N]

torch trains a small Llama for 60 steps and saves every 5 as DCP, while `reshard watch` converts the saves, keeps some and
removes others with their sources. With `--by transformers`, transformers' Trainer saves them as checkpoint-N and removes
old ones itself (save_total_limit). The watch and all that it has started are killed (SIGKILL) at random times and started
again, and so is the trainer, which resumes from its newest complete save and overwrites the one that it left half-written.
At the end:
  each save was converted exactly once, and its output had the bits of the model that was trained;
  what was removed had been converted and proven, and the newest and the kept are there;
  the older of these have no optimizer any more, and the newest are as torch saved them (DCP alone);
  nothing half-written or half-removed is left.
"""
import argparse
import hashlib
import json
import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time

KEEP_LAST, KEEP_EVERY, SAVE_EVERY, WITHOUT_OPTIMIZER_AFTER = 3, 20, 5, 2


def config(hidden=64, layers=2, dtype="float32"):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
            "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": dtype}  # fmt: skip


def resumed(run, model, optimizer):
    """Loads the newest complete save, if there is one. Returns its step, or 0."""
    import torch
    import torch.distributed.checkpoint as dcp

    newest = max((int(path.parent.name.rsplit("-", 1)[1]) for path in run.glob("step-*/.metadata")), default=0)
    if newest:
        for p in model.parameters():
            optimizer.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=run / f"step-{newest}")
        optimizer.load_state_dict(state["optimizer"])
    return newest


def train(run, steps, pause=0.0, every=SAVE_EVERY, first=1, digests=None, models=None, mark=None, **shape):
    """Trains a Llama and saves it with its optimizer as run/step-N, from step `first` on. Writes the digests of its tensors to digests/N.json.

    With `mark`, resumes from the newest save, and creates this file when it begins to train.
    Waits while a save that is still to be kept has no output below `models`: on a busy machine, the watch would find it only
    when others are kept.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers

    torch.manual_seed(1)
    torch.set_num_threads(1)
    made = transformers.LlamaConfig(**config(**shape))
    model = transformers.LlamaForCausalLM(made).to(getattr(torch, config(**shape)["torch_dtype"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pattern = torch.arange(made.vocab_size).roll(1)  # a fixed token follows each, so the model can learn
    last = 0
    if mark:
        last = resumed(run, model, optimizer)
        mark.touch()
    for step in range(last + 1, steps + 1):
        if mark:
            torch.manual_seed(step)
        tokens = torch.randint(made.vocab_size, (4, 1))
        tokens = torch.cat([tokens, pattern[tokens], pattern[pattern[tokens]]], dim=1)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause)
        if step % every == 0 and step >= first:
            state = model.state_dict()
            if digests:
                before_save(state, step, digests, models and models / f"step-{step - 2 * every}", step > 2 * every)
            dcp.save({"model": state, "optimizer": optimizer.state_dict(), "step": step}, checkpoint_id=run / f"step-{step}")


def before_save(state, step, digests, output, waits):
    """Writes the digests of a state. If it `waits`, then until the output of an earlier step is there, if outputs are made."""
    import torch

    while waits and output and not output.exists():
        time.sleep(0.05)
    here = {k: hashlib.sha256(v.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for k, v in state.items()}
    (digests / f"{step}.json").write_text(json.dumps(here))


def train_by_trainer(run, steps, pause, digests, models, mark):
    """Trains the same Llama with transformers' Trainer, which keeps its last KEEP_LAST saves. Resumes as `train` does."""
    import torch
    import transformers

    class Saves(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            mark.touch()

        def on_step_end(self, args, state, control, model=None, **_):
            time.sleep(pause)
            step = state.global_step
            if step % SAVE_EVERY == 0:
                before_save(model.state_dict(), step, digests, models / f"checkpoint-{step - 2 * SAVE_EVERY}", step > 2 * SAVE_EVERY)

    torch.manual_seed(1)
    torch.set_num_threads(1)
    made = transformers.LlamaConfig(**config())
    rows = [{"input_ids": [i, (i + 511) % 512], "labels": [i, (i + 511) % 512]} for i in range(512)]
    arguments = transformers.TrainingArguments(
        output_dir=run, max_steps=steps, save_steps=SAVE_EVERY, save_total_limit=KEEP_LAST, per_device_train_batch_size=4,
        learning_rate=1e-3, use_cpu=True, report_to=[], logging_strategy="no", disable_tqdm=True)  # fmt: skip
    trainer = transformers.Trainer(model=transformers.LlamaForCausalLM(made), args=arguments, train_dataset=rows, callbacks=[Saves()])
    saved = [path.parent for path in run.glob("checkpoint-*/trainer_state.json")]
    newest = max(saved, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)
    trainer.train(resume_from_checkpoint=newest and str(newest))


def compare(digests, log, output):
    """What --then runs: fails if an output is not the model that was trained, and otherwise adds it to the log."""
    step = output.name.rsplit("-", 1)[1]
    made = {}
    for file in output.glob("*.safetensors"):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                made[name] = hashlib.sha256(data[start + begin:start + end]).hexdigest()
    if made != json.loads((digests / f"{step}.json").read_text()):
        sys.exit(f"{output}: is not the model that was trained")
    with open(log, "a") as f:
        f.write(step + "\n")


class Run:
    """A directory with the run, its outputs, what is known of them, and the watch."""

    def __init__(self, reshard, directory, by):
        self.by, self.is_dcp = by, by == "torch"
        self.run, self.models, self.digests = (directory / name for name in ("run", "models", "digests"))
        self.log, self.events, self.mark = directory / "proven", directory / "events", directory / "trains"
        for made in (self.run, self.digests):
            made.mkdir()
        (directory / "config.json").write_text(json.dumps(config()))
        self.log.touch()
        then = shlex.join([sys.executable, os.path.abspath(__file__), "--compare", str(self.digests), str(self.log)])
        self.command = [reshard, "watch", self.run, self.models, "--to", "hf", "--config", directory / "config.json",
                        "--interval", "0.1", "--keep-last", str(KEEP_LAST), "--keep-every", str(KEEP_EVERY),
                        "--json", "--then", then + " {}"]  # fmt: skip
        if self.is_dcp:
            self.command += ["--without-optimizer-after", str(WITHOUT_OPTIMIZER_AFTER), "--prune-source"]

    def watch(self, *more):
        with open(self.events, "a") as out:
            return subprocess.Popen([*self.command, *more], stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def kill_after(self, seconds):
        child = self.watch()
        time.sleep(seconds)
        os.killpg(child.pid, signal.SIGKILL)
        if child.wait() != -signal.SIGKILL:
            sys.exit(f"watch ended by itself with {child.returncode}:\n{self.events.read_text()}")

    def train(self, steps, pause):
        return subprocess.Popen([sys.executable, "-W", "ignore", os.path.abspath(__file__), "--train", self.by, self.run,
                                 self.digests, self.models, self.mark, str(steps), str(pause)])  # fmt: skip

    def faults(self, steps):
        """Yields what is not as it should be at the end."""
        told = [json.loads(line) for line in self.events.read_text().splitlines() if line.startswith("{")]
        events = [(e["event"], e.get("step")) for e in told]
        proven = {int(step) for step in self.log.read_text().split()}
        saved = set(range(SAVE_EVERY, steps + 1, SAVE_EVERY))
        kept = {s for s in saved if s % KEEP_EVERY == 0} | set(sorted(saved)[-KEEP_LAST:])
        yield from (f"failed: {e['text']}" for e in told if e["event"] == "failed")
        yield from (f"step {s} was converted {events.count(('converted', s))} times" for s in saved if events.count(("converted", s)) > 1)
        yield from (f"step {s} was not proven" for s in saved - proven)
        newest = set(sorted(saved)[-KEEP_LAST:])
        for what, directory, wanted in (("source", self.run, kept if self.is_dcp else newest), ("output", self.models, kept)):
            there = {int(p.name.rsplit("-", 1)[1]) for p in directory.glob("step-*" if self.is_dcp else "checkpoint-*")}
            yield from (f"the {what} of step {s} is gone" for s in wanted - there)
            yield from (f"the {what} of step {s} is left" for s in there - kept if what == "output")
            yield from (f"{p} is left" for p in directory.glob(".*") if p.name not in (".reshard-watch.json", ".reshard.lock"))
        for source in self.run.glob("step-*"):
            step = int(source.name.rsplit("-", 1)[1])
            spared = step in sorted(saved)[-WITHOUT_OPTIMIZER_AFTER:]
            text = subprocess.run([self.command[0], "inspect", source], capture_output=True, text=True).stdout
            if ("exp_avg" in text) != spared:
                yield f"{source}: {'lost' if spared else 'has'} its optimizer:\n{text}"
        yield from (f"unexpected text: {line}" for line in self.events.read_text().splitlines() if line and not line.startswith("{"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("reshard", type=os.path.abspath)
    parser.add_argument("--by", choices=["torch", "transformers"], default="torch")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--trainer-kills", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as directory:
        it = Run(args.reshard, pathlib.Path(directory), args.by)
        waits = [chance.uniform(0.02, 1.0) for _ in range(args.kills)]
        pause = sum(waits) / args.steps
        trainer = it.train(args.steps, pause)
        both = chance.sample(range(args.kills), args.trainer_kills)
        try:
            while not any(it.run.iterdir()) and trainer.poll() is None:
                time.sleep(0.05)
            for k, wait in enumerate(waits):
                it.kill_after(wait)
                if k in both:
                    trainer.kill()
                    trainer.wait()
                    it.mark.unlink()
                    trainer = it.train(args.steps, pause)
                    while not it.mark.exists() and trainer.poll() is None:
                        time.sleep(0.05)
            last = it.watch()
            code = trainer.wait()
            last.terminate()
            if last.wait() != 128 + signal.SIGTERM or code != 0:
                sys.exit(f"watch: exit code {last.returncode}; training: {code}\n{it.events.read_text()}")
        finally:
            trainer.kill()
        last = it.watch("--once")
        if last.wait() != 0:
            sys.exit(f"watch --once: exit code {last.returncode}:\n{it.events.read_text()}")
        faults = list(it.faults(args.steps))
        if faults:
            sys.exit("\n".join(faults))
    print(f"watch: {args.steps // SAVE_EVERY} saves by {args.by}, {args.kills} kills, {args.trainer_kills} of the trainer; each save converted "
          "once and proven")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "--train":
        run, digests, models, mark = map(pathlib.Path, sys.argv[3:7])
        trains = train if sys.argv[2] == "torch" else train_by_trainer
        trains(run, int(sys.argv[7]), float(sys.argv[8]), digests=digests, models=models, mark=mark)
    elif sys.argv[1] == "--compare":
        compare(*map(pathlib.Path, sys.argv[2:5]))
    else:
        main()
