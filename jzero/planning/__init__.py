"""What a training run would take on hardware that need not be there: memory, traffic and time of a step."""

from jzero.planning.candidates import Stage, abstract_batch, blueprint_of, stages
from jzero.planning.prediction import Prediction, predict
from jzero.planning.ranking import search
from jzero.planning.recommendation import Recommendation, predict_config, recommend, what_would_fit
from jzero.planning.times import bandwidth_needed

__all__ = [
    "Prediction",
    "Recommendation",
    "Stage",
    "abstract_batch",
    "bandwidth_needed",
    "blueprint_of",
    "predict",
    "predict_config",
    "recommend",
    "search",
    "stages",
    "what_would_fit",
]
