dataset = "shakespeare_char"
learning_rate = 1e-3
max_iters = 5000
eval_interval = 250
log_interval = 10
