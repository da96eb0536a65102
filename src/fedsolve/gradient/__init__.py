"""Gradient methods: what closed forms are compared with, and feedback alignment for all of them.

Each algorithm is one file. Importing this package enters them in the registry; torch is loaded when one
is trained.
"""

from fedsolve.gradient.fedacg import FedACG
from fedsolve.gradient.fedavg import FedAvg
from fedsolve.gradient.fedavgm import FedAvgM
from fedsolve.gradient.fedawa import FedAWA
from fedsolve.gradient.feddisco import FedDisco
from fedsolve.gradient.feddyn import FedDyn
from fedsolve.gradient.fedfisher import FedFisher, FedFisherKFAC
from fedsolve.gradient.fedgen import FedGen
from fedsolve.gradient.fedlc import FedLC
from fedsolve.gradient.fedlpa import FedLPA
from fedsolve.gradient.fedntd import FedNTD
from fedsolve.gradient.fedprox import FedProx
from fedsolve.gradient.fedrs import FedRS
from fedsolve.gradient.fedsol import FedSOL
from fedsolve.gradient.moon import MOON
from fedsolve.gradient.scaffold import Scaffold

__all__ = [
    "MOON",
    "FedACG",
    "FedAWA",
    "FedAvg",
    "FedAvgM",
    "FedDisco",
    "FedDyn",
    "FedFisher",
    "FedFisherKFAC",
    "FedGen",
    "FedLC",
    "FedLPA",
    "FedNTD",
    "FedProx",
    "FedRS",
    "FedSOL",
    "Scaffold",
]
