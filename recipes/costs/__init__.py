"""Layer costs without a machine: an analytic model of nine large heterogeneous models, and random heterogeneous cases."""
