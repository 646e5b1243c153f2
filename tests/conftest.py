"""Tiny tensors: one thread is faster than two, and does not wait for a busy core."""

import torch

torch.set_num_threads(1)
