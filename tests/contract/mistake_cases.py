"""What a model keeps by which libraries know it, and what scripts call by mistake, on two devices of each engine."""

from casekit import MLP, accelerate, case

import torchacc
from torchacc.engines.base import sharded_model


@case()
def model_keeps_the_name_of_its_class_and_is_an_instance_of_it() -> None:
    model = accelerate(MLP())
    assert isinstance(model, MLP)
    assert (type(model).__name__, type(model).__qualname__) == ("MLP", "MLP")
    assert type(model).__module__ == MLP.__module__
    assert repr(model).startswith("MLP(\n")
    assert type(model.layers[:1][0]).__name__ == "Sequential"
    assert str(torchacc.describe(model)).startswith(f"engine      {sharded_model(model).engine.kind}")
