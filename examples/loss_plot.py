"""The picture of a training run."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def plot_loss(metrics: dict[str, Any], path: Path) -> None:
    """Draw the training loss against what it should beat.

    Args:
        metrics: The run's, as metrics.json holds them.
        path: The image to write.
    """
    losses, entropy, held_out = metrics["losses"], metrics["unigram_entropy"], metrics["held_out_loss"]
    steps = range(1, len(losses) + 1)
    reach = len(losses) // 40  # the mean of as many steps before as after does not lag behind
    windows = [losses[i - min(reach, i) : i + min(reach, i) + 1] for i in range(len(losses))]
    smooth = [sum(window) / len(window) for window in windows]

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training loss, each step")
    axes.plot(steps, smooth, color="tab:blue", linewidth=2, label="training loss, smoothed")
    axes.axhline(entropy, color="tab:gray", linestyle="--", label=f"token frequencies alone: {entropy:.2f}")
    axes.plot(len(losses), held_out, "o", color="tab:orange", markersize=8, label=f"held-out text: {held_out:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    num_devices = metrics["num_devices"]
    axes.set_title(f"GPT-2 on {num_devices} device{'s' * (num_devices > 1)} ({metrics['engine']})")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
