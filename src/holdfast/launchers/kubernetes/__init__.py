"""Kubernetes: manifests of a job."""
