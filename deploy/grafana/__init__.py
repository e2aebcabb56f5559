"""Grafana dashboards and Prometheus alerts, as code: ``python -m warmroot.deploy.grafana`` writes the chart's files."""
