"""The types of the clients' replies and arguments, in one place."""

from attention_client.arguments import (
    AlternativeLike,
    ConfigLike,
    DropoutLike,
    EditLike,
    ProjectionsLike,
    SelectLike,
    SessionShapeLike,
    ShapeLike,
    SpecLike,
    SweepLike,
    TensorMap,
)
from attention_client.array_likes import TensorLike
from attention_client.calls import CallOptions, MediaType
from attention_client.media_files import AudioLike, ImageLike
from attention_client.raw_responses import RawResponse
from attention_contract.schemas.analyses.circuits import CircuitsReply
from attention_contract.schemas.analyses.effects import Effects, EffectsReply
from attention_contract.schemas.analyses.hopfield import HopfieldReply
from attention_contract.schemas.analyses.rollout import RecordingRollout, RolloutReply
from attention_contract.schemas.analyses.similarity import RecordingSimilarity, SimilarityReply
from attention_contract.schemas.answers import Picture
from attention_contract.schemas.attention import ApproximationError, ForwardReply, KernelName, Ran, Tap
from attention_contract.schemas.checkpoints import CheckpointReply
from attention_contract.schemas.costs.accuracy import AccuracyReply
from attention_contract.schemas.costs.complexity import ComplexityReply
from attention_contract.schemas.costs.hardware import HardwareList
from attention_contract.schemas.gradients import GradientCheck, GradientsReply, PassReply
from attention_contract.schemas.modules import ModuleConfig, ModuleInfo, ModuleList, Parameter, ParameterList
from attention_contract.schemas.picture_options import PictureFields, PictureFormat
from attention_contract.schemas.server import Health, ServerInfo, VariantList
from attention_contract.schemas.weights import HeadStatistics, TopKeys, WeightsReply
from attention_contract.spec import AttentionSpec

__all__ = [
    "AccuracyReply", "AlternativeLike", "ApproximationError", "AttentionSpec", "AudioLike", "CallOptions",
    "CheckpointReply", "CircuitsReply", "ComplexityReply", "ConfigLike", "DropoutLike", "EditLike", "Effects",
    "EffectsReply", "ForwardReply", "GradientCheck", "GradientsReply", "HardwareList", "HeadStatistics", "Health",
    "HopfieldReply", "ImageLike",
    "KernelName", "MediaType", "ModuleConfig", "ModuleInfo", "ModuleList", "Parameter", "ParameterList", "PassReply",
    "Picture", "PictureFields", "PictureFormat", "ProjectionsLike", "Ran", "RawResponse", "RecordingRollout",
    "RecordingSimilarity", "RolloutReply", "SelectLike", "ServerInfo", "SessionShapeLike", "ShapeLike",
    "SimilarityReply", "SpecLike", "SweepLike", "Tap", "TensorLike", "TensorMap", "TopKeys", "VariantList",
    "WeightsReply",
]  # fmt: skip
