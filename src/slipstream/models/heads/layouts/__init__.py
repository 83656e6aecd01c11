"""The layouts in which EAGLE heads are stored, one file each: a head is read in the first that knows its folder."""

from __future__ import annotations

from slipstream.models.heads.checkpoint import HeadFiles, TargetShape, check_target, check_tensors
from slipstream.models.heads.eagle_shape import EagleCheckpoint
from slipstream.models.heads.kinds import check_kind
from slipstream.models.heads.layouts import eagle1, eagle3, specforge, speculators
from slipstream.models.heads.layouts.common import Spelling, check_vocabulary

_LAYOUTS = (speculators, specforge, eagle3, eagle1)


def read_eagle(files: HeadFiles, target: TargetShape) -> EagleCheckpoint:
    """The head in these files, held against its own configuration and against the target."""
    check_kind(files.folder, files.tensors.keys(), "eagle")
    spelling = Spelling.of(files.tensors)
    names = spelling.read(files.tensors)
    layout = next(layout for layout in _LAYOUTS if layout.knows(files.config, names))  # the last knows all
    shape = layout.shape(files, names, target)
    check_target(files.folder, "hidden size", shape.target_hidden, target.hidden)
    check_target(files.folder, "vocabulary size", shape.vocab, target.vocab)
    shape.taps.check(target.layers)
    check_tensors(files.folder, names, shape.wanted, shape.optional, spelling.write)
    check_vocabulary(files.folder, names, shape)
    return EagleCheckpoint(shape, names, files.folder)
