"""gauss_newton: exact where its certificate holds, by derivatives that difference quotients confirm."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import attacks.gauss_newton.residuals
from attacks import ATTACKS
from attacks.gauss_newton.attack import GaussNewton
from attacks.gauss_newton.certificate import certify
from attacks.gauss_newton.levenberg import Minimum, jacobian, minimise
from attacks.gauss_newton.residuals import Residuals, compared_tensors
from attacks.gauss_newton.space import OpenSpace
from attacks.labels import labels_of
from attacks.mjp.affine import of_one_upload
from attacks.mjp.facts import linear_facts
from attacks.testing import CHECKS, Trial
from fedmjp.config import ModelConfig
from fedmjp.data.selection import select_for
from fedmjp.exchange import Exchange
from fedmjp.metrics import metric
from fedmjp.models.blueprint import blueprint
from fedmjp.models.build import build_vit
from fedmjp.models.classifier import VitClassifier
from fedmjp.patches import to_patches
from fedmjp.records import Upload
from fedmjp.scenario import Scenario
from fedmjp.threat import ThreatModel
from fedmjp.updates import gradient
from tests.attacks import QUICK

TINY = {"name": "deit_tiny", "image_size": 32, "patch_size": 16}  # four patches
PSNR = metric("psnr").function
