"""The LightningModule that `lightning_before.py` trains, and `lightning_after.py` as it is."""

from typing import Any

import lightning as L
import torch
from sentences import ACCUMULATED, EPOCHS, make_model
from transformers import get_linear_schedule_with_warmup


class Classifier(L.LightningModule):
    """Classify sentences by a small BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.model.bert.embeddings.position_embeddings.requires_grad_(False)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a batch."""
        loss = self.model(**batch).loss
        self.log("train_loss", loss, on_step=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss of a batch that is not trained on."""
        loss = self.model(**batch).loss
        self.log("val_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW over what is trained, and its schedule."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        schedule = get_linear_schedule_with_warmup(optimizer, 2, 4 * EPOCHS * ACCUMULATED)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
