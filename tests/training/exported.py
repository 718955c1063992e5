"""A monitor that has something to say of every figure."""

import torch
from torch import nn

from optimizer.training.monitor import HealthMonitor
from tests.training.planted import Fp8Linear


def a_monitor_that_saw_everything() -> HealthMonitor:
    """Two steps of a layer in FP8: a scaled loss, an overflow, and an alarm."""
    model = nn.Sequential(Fp8Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    monitor = HealthMonitor(model, optimizer, precision="fp8", scaler=scaler, every=1)
    for size in (1.0, 100.0, 1e4):  # each beyond the scale that the one before made
        loss = model(torch.full((2, 4), size)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        monitor.step(loss)
        optimizer.zero_grad()
    return monitor
