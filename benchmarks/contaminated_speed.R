# Fits one data set with flexmix or mixtools, as benchmarks/contaminated_speed.py asks, and times it.
#
# Rscript contaminated_speed.R METHOD FILE N D TOLERANCE REPEATS [FROZEN...]
#
# FILE holds y [N], x [N, D] by columns and, for flexmix, the start's responsibilities of the second
# component [N], all float64. FROZEN is the known expert: D coefficients, intercept, standard deviation.
# Prints a line a repeat: processor seconds, log-likelihood, iterations.

arguments <- commandArgs(trailingOnly = TRUE)
method <- arguments[1]
n <- as.integer(arguments[3])
d <- as.integer(arguments[4])
tolerance <- as.numeric(arguments[5])
repeats <- as.integer(arguments[6])
frozen <- as.numeric(arguments[-(1:6)])
numbers <- readBin(arguments[2], "double", n * (d + 2))
y <- numbers[1:n]
x <- matrix(numbers[n + seq_len(n * d)], n, d)
r <- numbers[n * (d + 1) + 1:n]

report <- function(fit_once) {
  for (i in seq_len(repeats)) {
    seconds <- sum(system.time(result <- fit_once())[c("user.self", "sys.self")])
    cat(sprintf("%.6f %.9f %d\n", seconds, result$loglik, as.integer(result$iterations)))
  }
}

if (method == "flexmix") {
  suppressPackageStartupMessages(library(flexmix))
  # The first component is known, the second a weighted regression by maximum likelihood: what a
  # driver of flexmix allows. FLXMRglm itself has no component without free parameters.
  setClass("FLXMRcontaminated", contains = "FLXMRglm")
  setMethod("FLXmstep", signature(model = "FLXMRcontaminated"),
    function(model, weights, components, ...) {
      fit <- lm.wfit(model@x, model@y, w = weights[, 2])
      sigma <- sqrt(sum(weights[, 2] * fit$residuals^2) / sum(weights[, 2]))
      first <- list(coef = frozen[c(d + 1, seq_len(d))], sigma = frozen[d + 2], df = 0)
      second <- list(coef = coef(fit), sigma = sigma, df = d + 2)
      list(model@defineComponent(first), model@defineComponent(second))
    })
  driver <- as(FLXMRglm(), "FLXMRcontaminated")
  frame <- data.frame(y = y, x)
  formula <- as.formula(paste("y ~", paste(names(frame)[-1], collapse = " + ")))
  gate <- as.formula(paste("~", paste(names(frame)[-1], collapse = " + ")))
  control <- list(tolerance = tolerance, iter.max = 20000, minprior = 0)
  report(function() {
    fit <- flexmix(formula, data = frame, k = 2, cluster = cbind(1 - r, r), model = driver,
                   concomitant = FLXPmultinom(gate), control = control)
    list(loglik = fit@logLik, iterations = fit@iter)
  })
} else {
  suppressPackageStartupMessages(library(mixtools))
  # Both experts are free: hmeEM has no way to keep one. Start: the frozen expert and the tail.
  tail <- lm.wfit(cbind(1, x), y, w = r)
  beta <- cbind(frozen[c(d + 1, seq_len(d))], coef(tail))
  sigma <- c(frozen[d + 2], sqrt(sum(r * tail$residuals^2) / sum(r)))
  report(function() {
    fit <- NULL
    capture.output(fit <- hmeEM(y, x, beta = beta, sigma = sigma, w = rep(0, d + 1), k = 2,
                                addintercept = TRUE, epsilon = tolerance, maxit = 20000))
    list(loglik = fit$loglik, iterations = length(fit$all.loglik) - 1)
  })
}
