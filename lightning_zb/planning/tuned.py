"""Starts for the tuning of the list scheduler: vectors that proved good, by the number of chunks per device.

Found by `tune` on the profiled costs of the first paper (Table 6 there) at several memory limits with 8, 16 and 32
devices. They are starts only: every search tries them all, tunes the best further and scores orders on its own costs.
Large numbers mean that one kind and level of pass always goes before another, whatever the microbatch.
"""

from __future__ import annotations

import numpy as np

# Layout of `tuning`; the two microbatch counts (fourth and fifth number) for 8 devices, to be scaled.
_STARTS: dict[int, tuple[str, ...]] = {
    2: (
        "300 2 0 20 12 0 -15 14 -13 -4.1 -6.2 8.1 -19 -0.33 -9 13 33 -14",
        "2e25 2 2 28 6 1.2 1.1e18 -8.2e18 -9.6e17 -1.9e19 -2.3e18 3.3e17 -9.9e18 4.8e18 2e19 1.9e19 1.1e19 -1.2e18",
        "2.5e10 2 3 28 6.2 0.62 -5200 10000 -11000 -6200 -12000 -4100 -18000 -7900 14000 -2500 10000 19000",
        "40000 1 3 11 10 0.38 -460 43 -1500 -260 300 -1800 -710 -84 300 440 2700 160",
        "530 1 2 31 25 0.75 -6.1 -3.6 -13 3.1 -3.4 7.7 -13 14 8.5 3.8 31 10",
        "5.6e5 1 3 2.8 27 0.25 -940 45 -2200 -380 -1100 -2800 -2700 -470 -190 440 9200 4600",
    ),
    4: (
        "2.9e17 1 2 1 14 0 6.2e6 9.5e5 -1.9e7 -2.5e7 -4.2e6 -1.7e7 -3.9e7 -1.1e7 1.5e7 -4.8e7 2.4e5 1.1e7 -2.5e7 "
        "-6.3e5 -1.4e7 -4.7e7 -9.7e6 -5.9e7 3.2e7 6.7e7 -4e7 -1e8 5e7 1.5e8",
        "10000 1 3 13 7 0.25 39 37 -3.8 -100 29 -12 -32 -66 -170 14 -3.4 52 -71 3 -51 -2.3 12 370 41 200 230 -120 110 95",
        "1.9e21 1 3 16 10 0.25 4.3e7 -8.5e6 -1.8e8 -1.7e8 3.8e7 -2.8e7 2.2e7 -5.5e5 6.7e7 3.6e6 -1.9e8 1.1e8 -2.9e7 "
        "-1.7e8 -5.4e6 -3.5e8 4.1e8 -1.7e8 1e9 6e7 -1.8e8 -6.7e8 -6.1e7 3.3e8",
        "7.1e21 1 3 16 9.5 0.25 4.3e7 -8.5e6 -5.6e8 -3.4e8 3.8e7 -2.8e7 -2.3e8 -5.5e5 6.7e7 3.6e6 -1.9e8 1.1e8 -2.9e7 "
        "-1.7e8 -5.4e6 -3.5e8 2.2e9 4.4e5 2.2e8 6e7 -1.6e8 -3.4e8 -6.1e7 3.3e8",
        "1.6e8 1 3 13 13 0.62 330 19 -1.2e5 -68000 15 -770 -2.5e5 -13000 65 -3.4e5 3.1 570 -2.3e5 66000 -630 -950 "
        "1.9e5 1.6e5 92000 -75000 -46000 -72000 2.4e5 -1.3e5",
        "2.6e6 1 3 23 17 0.25 820 3600 -16000 -3000 -1700 -1200 540 -14000 -4400 790 -3700 -640 -94 560 -170 -1900 "
        "5000 55000 15000 -590 -630 990 -330 12000",
        "2.3e11 1 3 15 6 0.12 57000 73000 -3.2e6 -2.2e7 -1.8e5 -9.7e5 -3e5 -4.6e5 -2e7 -2.4e6 -3.1e5 -2.7e5 -1.1e7 "
        "-9.7e6 41000 -31000 2.4e7 1.3e7 -14000 7.3e6 -1.7e6 1.9e6 1.7e7 1.6e7",
        "2.2e18 1 2 13 9 0.25 3.6e7 -3.2e7 2.6e7 -3.1e7 -2e8 8.9e7 -5.9e7 -7.2e7 4.5e7 -2.1e7 -8.3e7 -6e7 -1.9e7 "
        "3.7e6 -1.2e7 -1.1e8 2.5e7 2.1e8 1.9e8 8.5e7 -2.3e7 -1.4e7 1.9e8 -4.4e7",
        "4.5e15 1 3 3.5 28 1 1.1e7 -6e6 -5e7 -3.1e7 -1.5e7 -1.8e6 -1.1e8 1.5e7 -2.9e6 3.1e7 -1.2e7 5.8e6 -4.7e7 "
        "-3.9e7 -3.5e7 -1.7e8 2e7 -1.5e6 5.5e6 5.6e7 -5.1e6 -9.1e7 9.2e7 9e6",
        "3.5e8 1 2 7.5 24 1 12000 -12000 -8100 -19000 -1.5e5 -3.4e5 -79000 -70000 -19000 1e5 -1.3e5 48000 -5300 "
        "-99000 -20000 -1.2e5 1.8e5 -4200 -3500 94000 -11000 -1.1e5 1.9e5 1.7e5",
        "1.9e19 1 3 16 10 0.25 4.3e7 -8.5e6 -1.4e8 -1.9e8 3.8e7 -2.8e7 2.2e7 -5.5e5 1.1e8 3.6e6 -1.9e8 1.1e8 -2.9e7 "
        "-1.7e8 -5.4e6 -2.8e8 4.1e8 3.2e8 2.9e8 -1.8e8 -1.8e8 -5e8 -6.1e7 3.3e8",
        "5.6e9 1 2 18 18 1.8 21000 -39000 -7e5 -1.3e6 -1.2e6 -2.1e6 -5.5e6 -9.6e6 -3.8e5 6.4e5 -5.4e5 -2.6e6 -3.4e6 "
        "-2e6 -3.3e6 -1.1e6 4.1e6 5e6 2.6 2.7e5 -3.7e6 -1.9e6 1.8e6 1.1e6",
        "1.3e14 1 3 13 7 0.12 2.8e10 5.8e10 -8.4e11 -2.2e12 -1.3e11 3.1e11 -1.3e12 -6.5e11 -1.9e12 1.8e11 1.3e12 "
        "9.6e11 -2e10 -1.7e12 4e10 4.5e11 1e11 -1.4e11 2.9e12 1.5e12 -2.5e12 -1.3e12 -2e12 -8.1e10",
        "2.3e32 1 3 17 12 1.5 1.2e14 -1.2e14 -1.1e14 -3.4e14 -9.5e13 -2.9e14 -4e13 -1.6e14 1.4e14 1.2e14 -1.3e14 "
        "1.5e14 -3.9e14 -4e13 -3.2e12 5.4e13 -1.9e14 -2e14 4.3e13 5.9e14 9.2e13 6.2e14 2.9e13 -2.5e14",
    ),
}


def starting_parameters(levels: int, num_devices: int) -> list[np.ndarray]:
    """Vectors for a placement with that many chunks on its fullest device; none where no such placement was tuned."""
    vectors = [np.array([float(number) for number in text.split()]) for text in _STARTS.get(levels, ())]
    for vector in vectors:
        vector[3:5] = np.round(vector[3:5] * num_devices / 8)
    return vectors
