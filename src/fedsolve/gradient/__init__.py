"""Gradient methods: what closed forms are compared with, and feedback alignment for all of them.

Each algorithm is one file. Importing this package enters them in the registry; torch is loaded when one
is trained.
"""

from fedsolve.gradient.ditto import Ditto
from fedsolve.gradient.fedacg import FedACG
from fedsolve.gradient.fedala import FedALA
from fedsolve.gradient.fedas import FedAS
from fedsolve.gradient.fedavg import FedAvg
from fedsolve.gradient.fedavg_ft import FedAvgFT, FedProxFT
from fedsolve.gradient.fedavgm import FedAvgM
from fedsolve.gradient.fedawa import FedAWA
from fedsolve.gradient.feddbe import FedDBE
from fedsolve.gradient.feddisco import FedDisco
from fedsolve.gradient.feddyn import FedDyn
from fedsolve.gradient.fedfisher import FedFisher, FedFisherKFAC
from fedsolve.gradient.fedgen import FedGen
from fedsolve.gradient.fedlc import FedLC
from fedsolve.gradient.fedlpa import FedLPA
from fedsolve.gradient.fedntd import FedNTD
from fedsolve.gradient.fedpcl import FedPCL
from fedsolve.gradient.fedprox import FedProx
from fedsolve.gradient.fedrs import FedRS
from fedsolve.gradient.fedselect import FedSelect
from fedsolve.gradient.fedsol import FedSOL
from fedsolve.gradient.moon import MOON
from fedsolve.gradient.scaffold import Scaffold

__all__ = [
    "MOON",
    "Ditto",
    "FedACG",
    "FedALA",
    "FedAS",
    "FedAWA",
    "FedAvg",
    "FedAvgFT",
    "FedAvgM",
    "FedDBE",
    "FedDisco",
    "FedDyn",
    "FedFisher",
    "FedFisherKFAC",
    "FedGen",
    "FedLC",
    "FedLPA",
    "FedNTD",
    "FedPCL",
    "FedProx",
    "FedProxFT",
    "FedRS",
    "FedSOL",
    "FedSelect",
    "Scaffold",
]
