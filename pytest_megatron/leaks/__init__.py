"""What distributed tests leave behind in their ranks."""
