"""MaC-Cal: a masked bottleneck head on frozen features, and the rule that sets its sparsity."""

from calib.heads.bottleneck import MaskedBottleneckHead
from calib.heads.sparsity import SparsityController

__all__ = ["MaskedBottleneckHead", "SparsityController"]
