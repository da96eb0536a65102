"""Gradient methods: what closed forms are compared with, and feedback alignment for all of them.

Each algorithm is one file. Importing this package enters them in the registry; torch is loaded when one
is trained.
"""

from fedsolve.gradient.ditto import Ditto as Ditto
from fedsolve.gradient.fedacg import FedACG as FedACG
from fedsolve.gradient.fedala import FedALA as FedALA
from fedsolve.gradient.fedas import FedAS as FedAS
from fedsolve.gradient.fedavg import FedAvg as FedAvg
from fedsolve.gradient.fedavg_ft import FedAvgFT as FedAvgFT
from fedsolve.gradient.fedavg_ft import FedProxFT as FedProxFT
from fedsolve.gradient.fedavgm import FedAvgM as FedAvgM
from fedsolve.gradient.fedawa import FedAWA as FedAWA
from fedsolve.gradient.fedbabu import FedBABU as FedBABU
from fedsolve.gradient.fedbn import FedBN as FedBN
from fedsolve.gradient.feddbe import FedDBE as FedDBE
from fedsolve.gradient.feddisco import FedDisco as FedDisco
from fedsolve.gradient.feddyn import FedDyn as FedDyn
from fedsolve.gradient.fedfisher import FedFisher as FedFisher
from fedsolve.gradient.fedfisher import FedFisherKFAC as FedFisherKFAC
from fedsolve.gradient.fedgen import FedGen as FedGen
from fedsolve.gradient.fedlc import FedLC as FedLC
from fedsolve.gradient.fedlpa import FedLPA as FedLPA
from fedsolve.gradient.fednova import FedNova as FedNova
from fedsolve.gradient.fedntd import FedNTD as FedNTD
from fedsolve.gradient.fedopt import FedOpt as FedOpt
from fedsolve.gradient.fedpcl import FedPCL as FedPCL
from fedsolve.gradient.fedper import FedPer as FedPer
from fedsolve.gradient.fedproto import FedProto as FedProto
from fedsolve.gradient.fedprox import FedProx as FedProx
from fedsolve.gradient.fedrep import FedRep as FedRep
from fedsolve.gradient.fedrs import FedRS as FedRS
from fedsolve.gradient.fedselect import FedSelect as FedSelect
from fedsolve.gradient.fedsol import FedSOL as FedSOL
from fedsolve.gradient.flfa import FLFA as FLFA
from fedsolve.gradient.moon import MOON as MOON
from fedsolve.gradient.per_fedavg import PerFedAvg as PerFedAvg
from fedsolve.gradient.scaffold import Scaffold as Scaffold

__all__ = sorted(name for name, kind in vars().items() if isinstance(kind, type))
