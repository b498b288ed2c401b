"""How far a machine allows a plan to go: work counted from the plan, rates measured once, floors and predictions."""
