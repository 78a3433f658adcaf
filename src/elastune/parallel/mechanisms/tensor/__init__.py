"""A replica's layers divided over workers: virtual blocks whose number is the run's, summed along one tree."""
