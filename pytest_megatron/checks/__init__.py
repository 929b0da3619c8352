"""What is wrong with a workload before anything of it is started or submitted."""
