"""Candidate generators: they extend a pairing by synthetic candidates; one small file per method."""

from hardneg.core.generators.base import Generator as Generator
from hardneg.core.generators.base import registered_generators as registered_generators
from hardneg.core.generators.mochi import MoCHi as MoCHi
from hardneg.core.generators.synco import SynCo as SynCo
