"""Candidate generators: a pairing in, private candidates out; one small file each."""

from hardneg.core.generators.base import Generator as Generator
from hardneg.core.generators.base import registered_generators as registered_generators
from hardneg.core.generators.mochi import MoCHi as MoCHi
