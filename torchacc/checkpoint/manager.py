"""Save a training run now and then, keep the newest checkpoints, and find the one to go on from."""

import logging
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from operator import index
from os import PathLike
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn
from typing_extensions import Self

from torchacc.checkpoint.call_checks import path_first
from torchacc.checkpoint.evaluation_after_save import EvaluationAfterSave
from torchacc.checkpoint.loader import load, verify
from torchacc.checkpoint.own_format.locks import FolderLock
from torchacc.checkpoint.own_format.manifest import MANIFEST, read_manifest
from torchacc.checkpoint.own_format.removal import foreign_names, recover_interrupted, remove
from torchacc.checkpoint.saver import free_copies, save_silently, snapshot
from torchacc.engines.sharded_model import sharded_model
from torchacc.errors import CheckpointError, ConfigError, listed
from torchacc.launch import progress
from torchacc.logging import get_logger

_log = get_logger(__name__)

_STEP = re.compile(r"step-(\d{8,})")
_INTERRUPTED = re.compile(r"\.(step-\d{8,})\.[^.]+\.(incomplete|replaced|removed)")
_PRUNED = re.compile(r"\.step-\d{8,}\.pruned")
_AGREE_SECS = 1.0
"""How long, about, a signal may wait for the processes to speak of it: in time for any grace period, and so seldom that
a meeting, which takes longer the more processes there are, costs a run of short steps nothing."""
_LOG_EVERY_SECS = 60.0
"""How long the log says nothing of further saves."""
EXIT_CODE = 128 + signal.SIGTERM
"""What a run that SIGTERM has ended exits with, once it is saved. Not 0, which would tell a scheduler that the work is
done: a Kubernetes job, say, would never be started again."""

T = TypeVar("T")


@dataclass(frozen=True)
class Restored:
    """What a run goes on from."""

    step: int
    """Number of steps that the run had made."""
    extra: Any
    """The object that was passed to `save()` as `extra`."""
    path: Path
    """The folder of the checkpoint."""


class CheckpointManager:
    """Saves the checkpoints of a run to subfolders, `step-00000100` …, and restores the newest complete one.

    It is a context manager. Its methods are collective: call them on every process, in the same order and with the same
    step. Only one job at a time can use a folder, which is locked until `close()` or the end of the process. Reading a
    checkpoint with `torchacc.checkpoint.load()` or `verify()` needs neither the manager nor the lock.

    A checkpoint that holds files of others is never deleted, whatever `keep` is.

    After a SIGTERM to any of the processes, such as the one before a preemption, `save_if_due()` saves on every process
    after the same step, and exits with code 143. This takes about one second and one step.

    Example:
        >>> with CheckpointManager("run", model=model, optimizer=optimizer, loader=loader, every_steps=100) as manager:
        ...     restored = manager.restore()
        ...     step = restored.step if restored else 0
        ...     for epoch in range(loader.epochs_done, num_epochs):
        ...         for batch in loader:
        ...             train(batch)
        ...             step += 1
        ...             manager.save_if_due(step)
    """

    @path_first("CheckpointManager(folder, model=model, optimizer=optimizer, loader=loader)")
    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        loader: Any = None,
        tokenizer: Any = None,
        every_steps: int | None = None,
        keep: int | None = None,
        async_save: bool = False,
    ) -> None:
        """Create the folder, remove the remains of interrupted saves, and install a handler of SIGTERM. Collective.

        Args:
            folder: The folder of the checkpoints, on a file system that all machines share.
            model: The model that `accelerate()` returned.
            optimizer: Its optimizer.
            scheduler: A scheduler, or any object with `state_dict()` and `load_state_dict()`.
            loader: The loader that `accelerate()` returned.
            tokenizer: A tokenizer or processor to save in each checkpoint.
            every_steps: `save_if_due()` saves at multiples of this number of steps; None to save on SIGTERM only.
            keep: Number of checkpoints to keep, the newest ones; None to keep all.
            async_save: If True, checkpoints are written in the background from a copy in host memory, for which this
                process must have room. The copy is complete when `save()` returns. Its memory is reused by the next
                save.

        Raises:
            CheckpointError: The folder cannot be written, or another job uses it.
            ConfigError: `every_steps` or `keep` is not an integer of 1 or more.
        """
        for name, value in (("every_steps", every_steps), ("keep", keep)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name}={value!r}: write a whole number of 1 or more, or None")
        self.folder = Path(folder).absolute()
        self.every_steps = every_steps
        self.keep = keep
        self.async_save = async_save
        self._contents = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
        self._evaluation_after_save = EvaluationAfterSave(loader)
        self._tokenizer = tokenizer
        self._group = sharded_model(model).engine.group
        self._is_rank0 = self._group.job.rank == 0
        self._group.expect_all("CheckpointManager()")
        self._saving: Future[None] | None = None
        """What is being written in the background."""
        self._saved_step: int | None = None
        self._restored_step: int | None = None
        self._logged_at: float | None = None
        self._agreement = _StepAgreement()
        self._lock = FolderLock(self.folder)
        self._is_closed = False
        self._kept: set[str] = set()
        self._on_rank0(self._tidy)
        self._signal = _SignalListener()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # An error may be this process's alone: whatever waits for another could wait for ever.
        if error is None:
            self.close()
        else:
            self._signal.unhook(hand_on=True)
            if self._saving is None or self._saving.done():  # else until the process ends
                self._lock.release()

    def restore(self) -> Restored | None:
        """Load the newest complete checkpoint. Collective: call it on every process.

        Damaged or incomplete ones are skipped with a warning that gives the reason, and are not deleted. A complete
        checkpoint that does not fit the model raises; older ones are not tried.

        Returns:
            The restored step, `extra` and path; None if there is no checkpoint yet.

        Raises:
            CheckpointError: None of the checkpoints is complete, or the newest complete one does not fit the model.
        """
        self._group.expect_all("CheckpointManager.restore()")
        self.wait()
        steps, reasons = self._on_rank0(self._candidates)
        for step in steps:
            path = self._path(step)
            try:
                with progress.during(progress.Phase.LOADING):
                    extra = load(path, **self._contents)
            except CheckpointError as error:
                if self._is_intact(path):
                    raise  # then it is the model that does not fit
                reasons.append(str(error))
                self._warn("%s is not restored: %s", path.name, error)
                continue
            _log.info("restored %s", path)
            self._saved_step = self._restored_step = step
            progress.resumed(step)
            return Restored(step=step, extra=extra, path=path)
        if reasons:
            others = " (warnings say what is wrong with the others)" if reasons[1:] else ""
            raise CheckpointError(
                f"{self.folder} holds {len(reasons)} checkpoints, and none is whole: {reasons[0]}{others}. Remove them "
                "to start anew"
            )
        _log.info("no checkpoint in %s: nothing is restored", self.folder)
        return None

    def save_if_due(self, step: int, extra: Any = None) -> bool:
        """Save if `step` is a multiple of `every_steps`; after a SIGTERM, save and exit. Collective.

        Call it on every process after each step, and after any evaluation at that step.

        Args:
            step: Number of steps that the run has made.
            extra: Any other state to save: numbers, strings, tensors, lists and dicts.

        Returns:
            Whether a checkpoint was saved or, with `async_save`, its save was started.

        Raises:
            CheckpointError: This or the previous checkpoint could not be written.
            SystemExit: With code 143 after a SIGTERM, once the checkpoint is complete.
        """
        self._evaluation_after_save.on_step(step)
        has_failed = self._saving is not None and self._saving.done() and self._saving.exception() is not None
        is_ending, has_failed = self._agreement.hear(self._group, self._signal.came, has_failed)
        if is_ending:
            self._end(step, extra)
        if has_failed:
            self.wait()
        is_due = self.every_steps is not None and step % self.every_steps == 0
        if is_due:
            self.save(step, extra)
        return is_due

    def save(self, step: int, extra: Any = None) -> None:
        """Save a checkpoint now. Collective: call it on every process.

        It replaces a checkpoint of the same step. With `async_save` it waits for the previous save to complete, and
        returns once the state is copied.

        Args:
            step: Number of steps that the run has made.
            extra: Any other state to save, as for `save_if_due()`.

        Raises:
            CheckpointError: This or the previous checkpoint could not be written. Raised on every process.
            ConfigError: `step` is not an integer of 0 or more.
        """
        with progress.during(progress.Phase.SAVING):
            self._save(step, extra, in_background=self.async_save)

    def wait(self) -> None:
        """Wait until the save in the background is complete. Call it on every process.

        Raises:
            CheckpointError: The checkpoint could not be written. Raised on every process.
        """
        saving, self._saving = self._saving, None
        if saving is not None and saving.exception() is not None:
            self._saved_step = None
            saving.result()

    def close(self) -> None:
        """Wait as `wait()` does, restore the previous handler of SIGTERM, and unlock the folder.

        Call it on every process. It also frees the host memory of `async_save`.
        """
        self._signal.unhook()
        self._is_closed = True
        try:
            self.wait()
        finally:
            free_copies(self._contents["model"])
            self._lock.release()

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, newest first. Not collective: any process may call it."""
        return _steps_in(self.folder)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _save(self, step: int, extra: Any, *, in_background: bool) -> None:
        if not hasattr(step, "__index__") or (step := index(step)) < 0:
            raise ConfigError(f"step={step!r}: write a whole number of 0 or more; no other would be found again")
        self.wait()
        if self._is_closed:
            self._on_rank0(self._lock.take)
        if self._is_rank0:
            self._put_aside(step)
        path, contents = self._path(step), {**self._contents, "extra": extra, "tokenizer": self._tokenizer}
        if in_background:
            pending = snapshot(path, **contents)

            def write() -> None:
                began = time.monotonic()
                pending.write()
                took = time.monotonic() - began
                self._log_save(f"saved {path} in the background, in {took:.1f} s ({pending.nbytes:,} bytes)")
                self._prune(step)

            self._saving = _in_background(write)
        else:
            self._log_save(save_silently(path, **contents))
            self._prune(step)
        if self._restored_step is not None and step < self._restored_step:
            self._warn(
                "step %d was saved, and step %d had been restored, which a restart will restore again: begin to count "
                "at restored.step",
                step,
                self._restored_step,
            )
            self._restored_step = None
        self._saved_step = step
        self._evaluation_after_save.on_save(step)

    def _log_save(self, message: str) -> None:
        """Log a save, and no more than one in a minute: a run may save after each step."""
        now = time.monotonic()
        is_new = self._logged_at is None or now - self._logged_at >= _LOG_EVERY_SECS
        self._logged_at = now if is_new else self._logged_at
        _log.log(logging.INFO if is_new else logging.DEBUG, "%s", message)

    def _end(self, step: int, extra: Any) -> NoReturn:
        # Still listening: a scheduler and the launcher may each send the signal, and the second would end the save.
        self._signal.came = False
        try:
            self.wait()
        except CheckpointError as error:  # that is no reason to lose this one, too
            self._warn("the last checkpoint was not saved: %s", error)
        if self._saved_step != step:
            self._save(step, extra, in_background=False)
        self.close()
        _log.info("SIGTERM: the run is saved after step %d, and ends with the exit code %d", step, EXIT_CODE)
        raise SystemExit(EXIT_CODE)

    def _tidy(self) -> None:
        """Complete or remove what the saves of a run that was cut short have left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock.take()
        found = sorted(path.name for path in self.folder.iterdir())
        for name in filter(_PRUNED.fullmatch, found):
            remove(self.folder / name)
        for name in dict.fromkeys(match[1] for match in map(_INTERRUPTED.fullmatch, found) if match):
            recover_interrupted(self.folder / name)
            if not (self.folder / name).exists():
                _log.warning("%s is not complete: its save was cut short, and what there was of it is removed", name)

    def _put_aside(self, step: int) -> None:
        """Give a checkpoint another name whose manifest is missing or cannot be read, so that one can be saved there.

        The run has gone on from an older one; which files are of this one is not known, so that none is removed.
        """
        path = self._path(step)
        with suppress(OSError):
            if not path.is_dir() or not any(path.iterdir()):
                return
            try:
                read_manifest(path)
            except CheckpointError as error:
                aside = next(
                    other for n in count(1) if not (other := path.with_name(f"{path.name}.damaged-{n}")).exists()
                )
                path.rename(aside)
                _log.warning("%s is now %s: %s", path.name, aside.name, error)

    def _prune(self, step: int) -> None:
        """Remove all but the newest checkpoints up to this one, which is complete. Rank 0 does it, in any thread.

        Later ones are not counted: they are of a run that this one did not go on from, as they were not whole.
        """
        if not self._is_rank0 or self.keep is None:
            return
        try:
            for old in [other for other in _steps_in(self.folder) if other <= step][self.keep :]:
                path = self._path(old)
                if foreign := foreign_names(path):
                    if path.name not in self._kept:
                        _log.warning("%s is kept, as %s in it is not of the checkpoint", path.name, listed(foreign))
                    self._kept.add(path.name)
                    continue
                # By another name first: half of it must not be taken for a checkpoint.
                aside = self.folder / f".{path.name}.pruned"
                path.rename(aside)
                remove(aside)
        except OSError as error:
            _log.warning("an old checkpoint could not be removed: %s", error)

    def _candidates(self) -> tuple[list[int], list[str]]:
        """Return the steps to restore, the newest first, and what is wrong with folders that are not checkpoints."""
        reasons = []
        for path in sorted(self.folder.iterdir(), reverse=True):
            if _STEP.fullmatch(path.name) and not (path / MANIFEST).is_file():
                reasons.append(f"{path} is not complete, as it has no {MANIFEST}")
                _log.warning("%s is not restored: it is not complete, as it has no %s", path.name, MANIFEST)
        return _steps_in(self.folder), reasons

    def _is_intact(self, path: Path) -> bool:
        """Return whether a checkpoint's bytes are as they were written. Collective: every process."""

        def check() -> bool:
            try:
                verify(path)
            except (CheckpointError, OSError):
                return False
            return True

        return self._on_rank0(check)

    def _warn(self, text: str, *values: Any) -> None:
        if self._is_rank0:
            _log.warning(text, *values)

    def _on_rank0(self, act: Callable[[], T]) -> T:
        """Return on every process what rank 0 finds, or raise what it meets with. Collective: every process."""
        found = self._group.call_on_all(lambda: act() if self._is_rank0 else None)
        return self._group.broadcast_object(found)  # type: ignore[no-any-return]


def _in_background(act: Callable[[], None]) -> Future[None]:
    """Call a function beside the training, in a thread that ends with it; the process does not end before."""
    executor = ThreadPoolExecutor(1, "torchacc-checkpoint")
    future = executor.submit(act)
    executor.shutdown(wait=False)
    return future


class _StepAgreement:
    """Lets the processes speak, about once a second, of what some of them have met with.

    They meet at the same step: how many steps from now is settled at the last meeting, by rank 0's clock.
    """

    def __init__(self) -> None:
        self._steps = 1
        self._left = 1
        self._has_met = False
        self._since = time.monotonic()

    def hear(self, group: Any, *news: bool) -> list[bool]:
        """Return which news any process has; none of it between two meetings. Collective: every process."""
        if not group.job.launched:
            return list(news)
        self._left -= 1
        if self._left:
            return [False] * len(news)
        if not self._has_met:  # on some processes only it would be so from the first one on
            self._has_met = True
            group.expect_all("CheckpointManager.save_if_due()")
        gathered = group.all_gather_objects((news, self._next_steps()))
        self._steps = self._left = gathered[0][1]
        self._since = time.monotonic()
        return [any(each) for each in zip(*(others for others, _ in gathered), strict=True)]

    def _next_steps(self) -> int:
        elapsed = max(time.monotonic() - self._since, 1e-6)
        # At most doubled: steps may come in bursts, say between two evaluations.
        return max(1, min(2 * self._steps, int(self._steps * _AGREE_SECS / elapsed)))


class _SignalListener:
    """Notes that SIGTERM has come, and lets who listened before hear of it, too."""

    def __init__(self) -> None:
        self.came = False
        self._previous: Any = signal.getsignal(signal.SIGTERM)
        # Python lets the main thread alone listen. None is a handler that is not Python's, and could not be put back.
        self._listens = threading.current_thread() is threading.main_thread() and self._previous is not None
        if self._listens:
            signal.signal(signal.SIGTERM, self._note)

    def unhook(self, *, hand_on: bool = False) -> None:
        """Put back the handler that was there before.

        Args:
            hand_on: Whether a signal that has come goes to that one now, as nothing will be saved any more.
        """
        if self._listens and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._previous)
            if self.came and hand_on and not callable(self._previous):
                signal.raise_signal(signal.SIGTERM)
        self._listens = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        if callable(self._previous):
            self._previous(number, frame)


def _steps_in(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, the newest first."""
    found = {path: _STEP.fullmatch(path.name) for path in folder.iterdir()}
    return sorted((int(name[1]) for path, name in found.items() if name and (path / MANIFEST).is_file()), reverse=True)
