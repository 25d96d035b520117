// Optimal transport with an entropy term, by Sinkhorn's algorithm in the log domain (Cuturi 2013,
// "Sinkhorn Distances: Lightspeed Computation of Optimal Transport"; Peyre and Cuturi 2019,
// "Computational Optimal Transport", sections 4.1 to 4.4). It is the balance (sinkhorn.h) with
// given row and column sums, any shape, and iterations until the sums are close enough.
//
//   minimize sum_rc P_rc M_rc + reg sum_rc P_rc log P_rc,   sum_c P_rc = a_r, sum_r P_rc = b_c
//   f_r <- log a_r - log sum_c exp(g_c - M_rc / reg)
//   g_c <- log b_c - log sum_r exp(f_r - M_rc / reg),   P_rc = exp(f_r + g_c - M_rc / reg)
//
// Legend: R sources (rows), C targets (columns).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace birkhoff {

struct Transport {
  at::Tensor cost_RC;             // M, of any sign
  at::Tensor source_R, target_C;  // the masses a and b: at least 0, with the same total
  double regularization = 0.01;   // in the unit of the costs; above 0
  // The iteration stops when no row sum is further from its mass than this share of the total.
  double tolerance = 1e-6;
  std::int64_t max_iterations = 100'000;  // at least 1
  // First solves with larger regularizations: the halves of each other from the largest difference
  // of costs down. Each solution starts from the potentials of the one before it.
  bool scales = false;
};

struct TransportPlan {
  at::Tensor p_RC;
  double cost = 0;  // sum_rc P_rc M_rc
  // The largest difference of a row sum, or of a column sum, from its mass, as a share of the total
  // mass.
  double source_error = 0, target_error = 0;
  std::int64_t iterations = 0;  // a step for the rows and a step for the columns each
  // False: stopped by max_iterations; with `scales`, perhaps at a larger regularization.
  bool converged = false;
  // For each iteration, the error of the columns after its row step and of the rows after its
  // column step, as above.
  std::vector<double> target_errors, source_errors;
};

// In fp64 on the CPU. The last step is a column step, so column sums are exact up to rounding.
// Masses of 0 are allowed. Error(kData) for values that are not finite, negative masses, and masses
// without a total or with different totals; Error(kUsage) if the regularization or the tolerance is
// not finite and above 0, or the regularization is too small for fp64.
TransportPlan solve_transport(const Transport& problem);

}  // namespace birkhoff
