"""What was measured, kept by what determines it: plan, workload, engine switches, machine, versions."""

from optimc.measure.store.engine_switches import EngineSwitches
from optimc.measure.store.key import ladder_key, measurement_key, quality_key
from optimc.measure.store.load_figures import LoadFigures
from optimc.measure.store.store import Entry, MeasurementStore
from optimc.measure.store.subject import PlanSubject

__all__ = [
    "EngineSwitches",
    "Entry",
    "LoadFigures",
    "MeasurementStore",
    "PlanSubject",
    "ladder_key",
    "measurement_key",
    "quality_key",
]
