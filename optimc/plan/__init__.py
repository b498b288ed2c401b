"""The plan file: one safetensors container holding an engine and everything needed to serve it."""

from optimc.plan.fusion_report import DeclinedSites, FusionReport, GraphReport, NearestMiss
from optimc.plan.heads import DraftTreeInfo, HeadAccuracy, HeadInfo, HeadsInfo, HeadsReport
from optimc.plan.kv_layout import KvDtype, KvKeys, KvLayer, KvLayout, KvProvenance
from optimc.plan.manifest import (
    FORMAT_VERSION,
    Limits,
    Manifest,
    ModelInfo,
    Quality,
    Source,
    TargetInfo,
    TokenIds,
)
from optimc.plan.pass_report import FrontierPoint, LayerReport, PassQuality, PassReport
from optimc.plan.reader import Plan, looks_like_a_plan
from optimc.plan.record_quality import record_quality
from optimc.plan.writer import PlanTensor, write_plan

__all__ = [
    "FORMAT_VERSION",
    "DeclinedSites",
    "DraftTreeInfo",
    "FrontierPoint",
    "FusionReport",
    "GraphReport",
    "HeadAccuracy",
    "HeadInfo",
    "HeadsInfo",
    "HeadsReport",
    "KvDtype",
    "KvKeys",
    "KvLayer",
    "KvLayout",
    "KvProvenance",
    "LayerReport",
    "Limits",
    "Manifest",
    "ModelInfo",
    "NearestMiss",
    "PassQuality",
    "PassReport",
    "Plan",
    "PlanTensor",
    "Quality",
    "Source",
    "TargetInfo",
    "TokenIds",
    "looks_like_a_plan",
    "record_quality",
    "write_plan",
]
