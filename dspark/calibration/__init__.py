"""Calibration: from what the verifier did to confidences that can be trusted, and a report that shows it.

events.py       the input of everything here: logits of the confidence head beside observed acceptances
measures.py     the numbers (ECE, Brier, NLL, AUROC, means): pure functions; metrics.py: torchmetrics classes
fitting.py      a map per slot by temperature.py (sequential temperature scaling), platt.py or isotonic.py
record.py       the fitted maps as a JSON record that refuses to go stale
scores.py       one row of numbers per estimator, law, domain and slot; bootstrap.py gives them intervals
choices.py      what a threshold on the survival would verify; how a calibration does on a domain it has not seen
drift.py        whether calibration has moved since an older report
report.py       report.json, report.html, TensorBoard; figures.py draws, html.py and text.py set the tables
"""
