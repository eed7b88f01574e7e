"""Report a run while it trains: a progress bar, a line for each interval, and files; see `docs/monitoring.md`."""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from torchacc.engines import registry
from torchacc.logging import get_logger
from torchacc.train.config import LoggingConfig, WandbConfig
from torchacc.train.expert_loads import ExpertLoads
from torchacc.train.flops import peak_flops
from torchacc.train.html_report import write_report
from torchacc.train.metric_sinks import MetricsFile, MetricSink, Row, TensorBoardFiles, WandbRun, check_packages
from torchacc.train.run_folder import METRICS, REPORT, TENSORBOARD, WANDB_ID
from torchacc.train.run_reading import memory_points

_log = get_logger(__name__)

UNTIMED_STEPS = 2
"""Steps at the start of a process that are in no rate: they compile, and take memory for the first time."""

_SHOWN = {
    "grad_norm": "grad norm {:.3g}",
    "tokens_per_sec": "{:,.0f} tokens/s",
    "mfu": "MFU {:.1%}",
    "device_memory_gib": "device memory {:.2f} GiB",
    "process_memory_gib": "process memory {:.2f} GiB",
    "data_wait": "data wait {:.1%}",
    "expert_imbalance": "fullest expert {:.2f} of even",
}
"""What the line of an interval shows after step, loss and learning rate."""


@dataclass
class _PendingRow:
    """A step whose values are still on the device."""

    row: Row
    scalars: dict[str, torch.Tensor]


class _Throughput:
    """Time of an interval that went into training, and its tokens."""

    def __init__(self, compile_secs: float) -> None:
        self._started = time.perf_counter()
        self._compile_secs = compile_secs
        self.aside_secs = self.data_wait_secs = 0.0
        self.tokens = self.steps = 0

    def secs(self, compile_secs: float) -> float:
        """Return the time since the start without what was set aside or went into compiling."""
        compiling = compile_secs - self._compile_secs
        return max(time.perf_counter() - self._started - self.aside_secs - compiling, 1e-9)


class _RunOutput:
    """What the master's log writes and says: the bar, the lines, `metrics.jsonl`, trackers, and the report."""

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        total_steps: int,
        resumed_at: int,
        logging: LoggingConfig,
        wandb: WandbConfig,
    ) -> None:
        self._folder, self._total_steps = folder, total_steps
        self._file = MetricsFile(folder / METRICS, resumed_at=resumed_at)
        self._sinks: list[MetricSink] = [self._file]
        if logging.tensorboard:
            self._sinks.append(TensorBoardFiles(folder / TENSORBOARD, resumed_at=resumed_at))
        if wandb.use_wandb:
            self._sinks.append(WandbRun(folder, folder / WANDB_ID, wandb, facts, resumes=resumed_at > 0))
        self.tokens: int = _last(self._file.kept, "tokens", 0)
        """Those of the run that this one goes on from."""
        self.secs: float = _last(self._file.kept, "secs", 0.0)
        """Those of the run that this one goes on from."""
        self._warned = False
        self._stack = ExitStack()
        self._bar = self._open_bar(resumed_at)

    def _open_bar(self, resumed_at: int) -> "tqdm[Any] | None":
        if not sys.stderr.isatty():
            return None
        spoken = [logger for logger in (get_logger("torchacc"), get_logger("")) if logger.handlers]
        self._stack.enter_context(logging_redirect_tqdm(spoken))
        return tqdm(total=self._total_steps, initial=resumed_at, unit="step", dynamic_ncols=True)

    def write(self, rows: Sequence[Row]) -> None:
        for sink in self._sinks:
            sink.write(rows)
        if self._bar is not None:
            self._bar.update(rows[-1]["step"] - self._bar.n)
        for row in rows:
            not_finite = _not_finite(row)
            if not_finite and not self._warned:
                self._warned = True
                what = " and ".join(f"the {name.replace('_', ' ')} is {row[name]}" for name in not_finite)
                text = f"step {row['step']}: {what}; later ones are not reported"
                _log.warning("%s", text)
                self._file.write([{"step": row["step"], "event": text}])

    def say_interval(self, row: Row) -> None:
        parts = [f"step {self.position(row['step'])}", f"loss {row['loss']:.4f}", f"lr {row['lr']:.2e}"]
        values = row | {f"{of}_memory_gib": peaks[0] / 2**30 for of, (_, peaks) in memory_points([row]).items()}
        parts += [text.format(values[name]) for name, text in _SHOWN.items() if name in values]
        _log.info("%s", "  ".join(parts))

    def position(self, step: int) -> str:
        return f"{step:>{len(str(self._total_steps))}}/{self._total_steps}"

    def finish(self, outcome: str, last: Row, facts: Mapping[str, Any]) -> None:
        """Close what is open and write the report. Raises nothing."""
        report = self._folder / REPORT
        with self._stack:
            try:
                if self._bar is not None:
                    self._bar.close()
                self.write([last])
                for sink in self._sinks:
                    sink.close(failed=outcome.startswith("failed"))
                write_report(report, self._file.read(), outcome, facts)
                _log.info("%s at step %s; report: %s", outcome, self.position(last["step"]), report)
            except Exception:
                _log.exception("the run ended (%s), and its report could not be written", outcome)


class RunLog:
    """Logs and writes what a run measures. Every process makes one and makes the same calls; only one of them writes.

    The values of a step stay on the device until the interval's end, where all are fetched at once: between two such
    moments the host runs ahead of the device. Every process fetches, so that the same tensors live in all of them and
    an XLA program is the same everywhere.

    Rates (tokens/s, MFU, data wait) are those of the interval, without its compile seconds, what runs in
    `aside()`, and the first two steps of the process.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        *,
        total_steps: int,
        tokens_per_step: int,
        log_every_steps: int = 10,
        flops_per_token: float | None = None,
        logging: LoggingConfig | None = None,
        wandb: WandbConfig | None = None,
        is_master: bool = True,
        resumed_at: int = 0,
        expert_loads: ExpertLoads | None = None,
    ) -> None:
        """Open the files; comes after `accelerate()`.

        Args:
            folder: The stage's folder, which exists.
            facts: What the report shows of the run: name -> value, or a heading -> such a mapping.
            total_steps: The run's last step.
            tokens_per_step: Tokens of a step on all devices, for steps that do not say their own.
            log_every_steps: Steps in an interval.
            flops_per_token: As `flops.flops_per_token()` gives it; None leaves MFU out.
            logging: Whether TensorBoard.
            wandb: Whether Weights & Biases, and as what.
            is_master: Whether this process speaks and writes.
            resumed_at: The step of the checkpoint that the run goes on from; 0 for a new run.
            expert_loads: What counts the tokens of experts, of each interval; None for none.

        Raises:
            ConfigError: A package that the options ask for is missing.
        """
        logging, wandb = logging or LoggingConfig(), wandb or WandbConfig()
        check_packages(logging, wandb)
        engine = registry.active_engine()
        assert engine is not None, "RunLog comes after accelerate()"
        self._engine = engine
        self._facts = dict(facts)
        self._total_steps, self._tokens_per_step, self._interval = total_steps, tokens_per_step, log_every_steps
        self._resumed_at, self._step = resumed_at, resumed_at
        self._expert_loads = expert_loads
        peak = peak_flops(engine.device_name())
        self._tokens_per_sec_at_peak: float | None = None
        if peak and flops_per_token:
            self._tokens_per_sec_at_peak = peak * engine.mesh.num_devices / flops_per_token
        self._held: list[_PendingRow] = []
        self.num_not_finite = 0
        """Steps in a row, up to the last one that was fetched, whose loss or gradient norm is not finite."""
        self._closed = False
        self._output: _RunOutput | None = None
        if is_master:
            self._output = _RunOutput(
                folder, facts, total_steps=total_steps, resumed_at=resumed_at, logging=logging, wandb=wandb
            )
        self._tokens = 0 if self._output is None else self._output.tokens
        self._earlier_secs = 0.0 if self._output is None else self._output.secs
        self._started = time.perf_counter()
        self._pace = _Throughput(engine.compile_report().secs)
        self._num_recompiles = len(engine.compile_report().recompiles)
        if resumed_at:
            self._mark("restart", f"went on from step {resumed_at} on {engine.mesh.num_devices} devices, {engine.name}")

    def step(
        self,
        step: int,
        *,
        loss: torch.Tensor,
        lr: float,
        grad_norm: torch.Tensor | None = None,
        tokens: int | None = None,
        data_wait_secs: float = 0.0,
    ) -> None:
        """Record an optimizer step, after it; waits for the devices at the end of an interval only.

        Args:
            step: Its number; the first of a run is 1.
            loss: The global loss, without dimensions, on the device.
            lr: The learning rate of the step.
            grad_norm: The norm of the gradients before clipping, without dimensions, on the device.
            tokens: Tokens of the step on all devices.
            data_wait_secs: Time that this process waited for the step's batches.
        """
        tokens = self._tokens_per_step if tokens is None else tokens
        self._step = step
        self._tokens += tokens
        self._pace.tokens += tokens
        self._pace.steps += 1
        self._pace.data_wait_secs += data_wait_secs
        scalars = {"loss": loss} if grad_norm is None else {"loss": loss, "grad_norm": grad_norm}
        row = {"step": step, "lr": lr, "tokens": self._tokens}
        self._held.append(_PendingRow(row, {name: scalar.detach() for name, scalar in scalars.items()}))
        taken = step - self._resumed_at
        if step % self._interval == 0 or step == self._total_steps:
            self._end_interval(has_rates=taken > UNTIMED_STEPS)
        if taken == UNTIMED_STEPS:
            self.flush()
            self._end_warm_up()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context manager for what is no training, such as an evaluation or a checkpoint: it is in no rate.

        What was measured before is fetched and written first, so that a run that goes on from a checkpoint saved here
        has all of it.
        """
        self.flush()
        began, compiled = time.perf_counter(), self._compile_secs()
        try:
            yield
        finally:
            # What compiles in here is taken off with all that compiles.
            self._pace.aside_secs += time.perf_counter() - began - (self._compile_secs() - compiled)

    def evaluated(self, step: int, loss: float) -> None:
        """Record an evaluation after a step."""
        self.flush()
        if self._output is not None:
            self._output.write([{"step": step, "eval_loss": loss}])
            _log.info("step %s  eval loss %.4f", self._output.position(step), loss)

    def event(self, text: str) -> None:
        """Log what happened, and keep it beside the metrics."""
        self.flush()
        if self._output is not None:
            self._output.write([{"step": self._step, "event": text}])
            _log.info("%s", text)

    def flush(self) -> None:
        """Fetch and write what is still on the device; waits for it."""
        self._write(self._fetch())

    def close(self, outcome: str, facts: Mapping[str, Any] | None = None) -> None:
        """End the run, and write its report. Raises nothing, as it may follow an error; a second call does nothing.

        Args:
            outcome: How it ended in a few words, such as `finished`, `stopped: SIGTERM` or `failed: out of memory`.
            facts: What came to be known since, for the report.
        """
        if self._closed:
            return
        self._closed = True
        num_held = len(self._held)
        try:
            self.flush()
        except Exception as error:
            _log.warning("what the last %d steps measured is lost: %s", num_held, error)
        if self._output is not None:
            last = {"step": self._step, "event": outcome, "secs": self._secs()}
            self._output.finish(outcome, last, self._run_facts() | self._facts | dict(facts or {}))

    def _run_facts(self) -> dict[str, Any]:
        compiled = self._engine.compile_report()
        return {
            "engine": self._engine.name,
            "devices": f"{self._engine.mesh.num_devices} × {self._engine.device_name()}",
            "mesh": self._engine.mesh.describe(),
            "processes": self._engine.job.num_processes,
            "compiled": f"{compiled.graphs} programs in {compiled.secs:.1f} s",
            **({"compiled anew": "; ".join(compiled.recompiles)} if compiled.recompiles else {}),
        }

    def _end_warm_up(self) -> None:
        compiled = self._engine.compile_report()
        secs = time.perf_counter() - self._started
        if self._output is not None:
            programs = f"{compiled.graphs} program{'s' * (compiled.graphs > 1)}"
            compiling = f", with {compiled.secs:.1f} s to compile {programs}" if compiled.graphs else ""
            _log.info("the first %d steps took %.1f s%s; rates leave them out", UNTIMED_STEPS, secs, compiling)
        self._pace = _Throughput(compiled.secs)

    def _end_interval(self, *, has_rates: bool) -> None:
        rows = self._fetch()  # waits for the devices, so that the interval ends when its last step does
        if has_rates:
            rows[-1] |= self._rates()
            self._pace = _Throughput(self._compile_secs())
        memory = self._engine.memory()
        if memory is not None:
            rows[-1][f"{memory.of}_memory_bytes"] = memory.peak_bytes
        loads = {} if self._expert_loads is None else self._expert_loads.take()
        if loads:
            rows[-1]["expert_loads"] = loads
            rows[-1]["expert_imbalance"] = max(max(shares) * len(shares) for shares in loads.values())
        rows[-1]["secs"] = self._secs()
        compiled = self._engine.compile_report()
        rows[-1]["compile_secs"] = compiled.secs
        self._write(rows)
        for recompile in compiled.recompiles[self._num_recompiles :]:
            self._mark("compile", f"compiled anew: {recompile}")
        self._num_recompiles = len(compiled.recompiles)
        if self._output is not None:
            self._output.say_interval(rows[-1])

    def _rates(self) -> Row:
        secs = self._pace.secs(self._compile_secs())
        rates: Row = {
            "tokens_per_sec": self._pace.tokens / secs,
            "secs_per_step": secs / self._pace.steps,
            "data_wait": min(self._pace.data_wait_secs / secs, 1.0),
        }
        if self._tokens_per_sec_at_peak is not None:
            rates["mfu"] = rates["tokens_per_sec"] / self._tokens_per_sec_at_peak
        return rates

    def _fetch(self) -> list[Row]:
        """Return the steps that are held, with their values, in one transfer."""
        scalars = [scalar for held in self._held for scalar in held.scalars.values()]
        values = iter(self._engine.read_scalars(scalars))
        rows = [held.row | {name: next(values) for name in held.scalars} for held in self._held]
        self._held.clear()
        for row in rows:
            self.num_not_finite = self.num_not_finite + 1 if _not_finite(row) else 0
        return rows

    def _write(self, rows: Sequence[Row]) -> None:
        if self._output is not None and rows:
            self._output.write(rows)

    def _mark(self, kind: str, text: str) -> None:
        """Keep an event that the report marks in its curves; it has been logged elsewhere."""
        self._write([{"step": self._step, "event": text, "mark": kind}])

    def _compile_secs(self) -> float:
        return self._engine.compile_report().secs

    def _secs(self) -> float:
        return self._earlier_secs + time.perf_counter() - self._started


def _not_finite(row: Row) -> list[str]:
    """Return which numbers of a step are not finite."""
    return [name for name in ("loss", "grad_norm") if not math.isfinite(row.get(name, 0.0))]


def _last(rows: Sequence[Row], name: str, default: Any) -> Any:
    return next((row[name] for row in reversed(rows) if name in row), default)
