// The source code of the GPU block-attention kernels, run on the CPU by an emulated block of
// threads, against fp64.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "attention/kernels/block_attention/gpu_arguments.h"
#include "attention/kernels/block_attention/gpu_kernels.h"
#include "attention/kernels/block_attention/gpu_terms.h"
#include "tests/attention/kernels/block_attention/block_attention_problem.h"
#include "tests/cluster/base/emulated_gpu.h"

namespace birkhoff::test {
namespace {

// Runs the kernel's thread blocks one after another.
template <typename Thread, typename Body>
void run_kernel(const BlockAttentionParams& params, bool backwards) {
  EmulatedBlock block(Body::kThreads, Body::kSharedBytes);
  for (std::int64_t task = 0; task < Body::num_tasks(params); ++task) {
    block.run(task, backwards, [&](int thread) { Body(Thread(block, thread), params).run(); });
  }
}

template <EmulatedNumber kNumber, int kHeadDim>
void run_forward(const BlockAttentionParams& params, bool backwards) {
  using Thread = EmulatedThread<kNumber>;
  with_forward_kernel<Thread, kHeadDim>(
      params, [&]<typename Body>() { run_kernel<Thread, Body>(params, backwards); });
}
template <EmulatedNumber kNumber, int kHeadDim>
void run_backward(const BlockAttentionParams& params, bool backwards) {
  using Thread = EmulatedThread<kNumber>;
  for_each_backward_kernel<Thread, kHeadDim>(
      params, [&]<typename Body>() { run_kernel<Thread, Body>(params, backwards); });
}

// Calls f with the emulated number and the compile-time head dim.
template <typename Function>
void with_kernel(const BlockAttentionParams& params, Function f) {
  const auto with_number = [&]<int kHeadDim>() {
    if (params.dtype == KernelDtype::kHalf) {
      f.template operator()<EmulatedNumber::kHalf, kHeadDim>();
    } else {
      f.template operator()<EmulatedNumber::kBFloat16, kHeadDim>();
    }
  };
  with_head_dim(params.head_dim, with_number);
}

// Returns out, d_q, then the gradients of the tables and the sink that there are, and then for each
// entry d_k, d_v and, if there is one, d_bias, for one softmax.
std::vector<at::Tensor> solve_entries(const BlockAttention& in, const at::Tensor& d_out,
                                      NoiseColumns columns, bool backwards) {
  const BlockOperands operands = with_gpu_rows(operands_of(in, columns));
  const BlockResults results = new_results(operands);
  BlockGradients gradients = new_gradients(operands, at::kFloat);
  // Numbers that a kernel forgets to write stay NaN.
  results.out_BHNbD.fill_(NAN);
  results.softmax_2BHNb.fill_(NAN);
  gradients.d_q_BHNbD.fill_(NAN);
  for (const KeyGradients& keys : gradients.keys) {
    for (const at::Tensor& x : {keys.d_k_BHNbD, keys.d_v_BHNbD, keys.d_bias}) {
      if (x.defined()) x.fill_(NAN);
    }
  }
  const DistanceTerms terms = forward_terms(operands);
  const BlockAttentionParams params = block_attention_params(operands, results, terms);
  with_kernel(params, [&]<EmulatedNumber kNumber, int kHeadDim>() {
    run_forward<kNumber, kHeadDim>(params, backwards);
  });
  add_values(terms, results);
  const at::Tensor delta = at::full_like(results.softmax_2BHNb[0], NAN);
  const at::Tensor aligned = with_aligned_rows(with_whole_columns(d_out));
  const DistanceTerms backward_terms = birkhoff::backward_terms(operands, aligned);
  const BlockAttentionParams backward_params =
      block_attention_params(operands, results, aligned, delta, backward_terms, gradients);
  with_kernel(params, [&]<EmulatedNumber kNumber, int kHeadDim>() {
    run_backward<kNumber, kHeadDim>(backward_params, backwards);
  });
  add_term_gradients(operands, results, aligned, delta, backward_terms, gradients);

  std::vector<at::Tensor> result;
  const auto add_rows = [&](const at::Tensor& x) {
    if (x.defined()) result.push_back(x.narrow(-1, 0, d_out.size(4)));
  };
  add_rows(results.out_BHNbD);
  add_rows(gradients.d_q_BHNbD);
  add_rows(gradients.d_relative_keys_HRD);
  add_rows(gradients.d_relative_values_HRD);
  for (const at::Tensor& x : {gradients.d_sink_H, gradients.d_relative_bias_HR}) {
    if (x.defined()) result.push_back(x);
  }
  for (std::size_t s = 0; s < operands.keys.size(); ++s) {
    const KeyGradients& keys = gradients.keys[s];
    add_rows(keys.d_k_BHNbD);
    add_rows(keys.d_v_BHNbD);
    if (!keys.d_bias.defined()) continue;
    const at::Tensor& bias = operands.keys[s].bias_BHNbb;
    result.push_back(at::sum_to(keys.d_bias, bias.sizes()).to(d_out.scalar_type()));
  }
  return result;
}

// As attend_fused() and its gradient. `backwards` reverses the order in which threads run.
std::vector<at::Tensor> solve_emulated(const BlockProblem& problem, bool backwards = false) {
  const at::AutoGradMode no_gradients(false);
  EXPECT_EQ(why_not_gpu_kernels(problem.attention), "") << problem.name;
  NoiseColumns columns;
  for (const KeyBlocks& keys : problem.attention.keys) columns.all += num_columns(keys);
  if (problem.attention.one_softmax) {
    return solve_entries(problem.attention, problem.d_out, columns, backwards);
  }
  const BlockAttention& in = problem.attention;
  std::vector<at::Tensor> result;
  for (const KeyBlocks& keys : in.keys) {
    BlockAttention one = in;
    one.keys = {keys};
    const auto part = solve_entries(one, problem.d_out, columns, backwards);
    if (result.empty()) {
      result = part;
    } else {
      const std::size_t num_shared = 2u + in.relative.defined() + in.relative.values_HRD.defined() +
                                     in.sink_H.defined() + in.relative.bias_HR.defined();
      for (std::size_t i = 0; i < num_shared; ++i) result[i] = result[i] + part[i];
      result.insert(result.end(), part.begin() + static_cast<std::ptrdiff_t>(num_shared),
                    part.end());
    }
    columns.first += num_columns(keys);
  }
  return result;
}

void check(const BlockProblem& problem) {
  expect_errors_of_reference(solve_emulated(problem), problem);
}

constexpr KeyChoice kSorted{.mask = KeyChoice::kBlocks, .bias = true}, kOwn{.causal = true};

TEST(BlockAttentionEmulation, OneTile) {
  check(make_block_problem({.block = 64}, {{}}, at::kBFloat16, 1, 0, 1));
}

TEST(BlockAttentionEmulation, SinkhornAttention) {
  check(make_block_problem({.batch = 2, .heads = 2, .blocks = 3, .block = 32}, {kSorted, kOwn},
                           at::kBFloat16, 1, 0, 2));
  check(make_block_problem({.blocks = 2, .block = 64, .head_dim = 128}, {kSorted, kOwn},
                           at::kBFloat16, 1, 0, 3));
}

TEST(BlockAttentionEmulation, BlocksThatLookBack) {
  const KeyChoice window{.first_offset = -1, .causal = true};
  check(
      make_block_problem({.heads = 2, .blocks = 3, .block = 37}, {window}, at::kBFloat16, 1, 0, 4));
  check(make_block_problem({.blocks = 2, .block = 64, .head_dim = 128}, {window}, at::kBFloat16, 3,
                           0, 5));
}

// The queries of the first block have no tile of keys.
TEST(BlockAttentionEmulation, BlocksWithoutKeys) {
  check(make_block_problem({.blocks = 2, .block = 64}, {{.first_offset = -1, .last_offset = -1}},
                           at::kBFloat16, 1, 0, 19));
}

TEST(BlockAttentionEmulation, BlocksOfManyTiles) {
  check(make_block_problem({.blocks = 1, .block = 140}, {kOwn}, at::kBFloat16, 1, 0, 6));
  check(make_block_problem({.blocks = 1, .block = 100, .head_dim = 96}, {kSorted, kOwn},
                           at::kBFloat16, 1, 0, 7));
}

// Both tiles of queries share a thread block, and with it tiles of keys. Causal queries of the
// first tile do not see the second tile of keys.
TEST(BlockAttentionEmulation, BlocksOfTwoTiles) {
  for (const KeyChoice& own : {KeyChoice{}, kOwn}) {
    check(make_block_problem({.batch = 2, .heads = 2, .blocks = 2, .block = 128}, {own},
                             at::kBFloat16, 1, 0, 40));
    check(make_block_problem({.blocks = 2, .block = 128}, {kSorted, own}, at::kHalf, 1, 0, 41));
    check(make_block_problem({.blocks = 2, .block = 96, .head_dim = 128}, {kSorted, own},
                             at::kBFloat16, 1, 0, 42));
    check(make_block_problem({.blocks = 2, .block = 128, .head_dim = 128}, {own}, at::kBFloat16, 1,
                             0, 43));
  }
}

TEST(BlockAttentionEmulation, BlocksOfTwoTilesWithAllTerms) {
  // One kernel for all gradients; then grouped queries and neighbours, which have two.
  const KeyChoice pairs{.causal = true, .mask = KeyChoice::kPairs},
      window{.first_offset = -1, .causal = true, .mask = KeyChoice::kNear};
  check(with_sink(with_relative(make_block_problem({.batch = 2, .blocks = 2, .block = 96},
                                                   {kSorted, pairs}, at::kBFloat16, 1, 0.3f, 44),
                                65, -64, false, 44),
                  44));
  check(make_block_problem({.heads = 2, .block = 65}, {{.mask = KeyChoice::kQueries}, kSorted},
                           at::kBFloat16, 1, 0.2f, 45));
  check(make_block_problem({.heads = 2, .blocks = 2, .block = 100, .group = 2}, {kSorted, kOwn},
                           at::kBFloat16, 1, 0.2f, 46));
  check(with_sink(make_block_problem({.blocks = 3, .block = 128}, {window}, at::kHalf, 1, 0, 47),
                  47));
}

// As of padding: all queries have the same.
TEST(BlockAttentionEmulation, MasksOfKeys) {
  const KeyChoice keys{.mask = KeyChoice::kKeys};
  for (const std::int64_t block : {24, 64, 100, 128}) {
    check(make_block_problem({.batch = 2, .blocks = 2, .block = block}, {kSorted, keys},
                             at::kBFloat16, 1, 0, 50));
  }
  // Gradients of keys have a kernel of their own.
  check(make_block_problem({.batch = 2, .blocks = 3, .block = 64},
                           {{.first_offset = -1, .causal = true, .mask = KeyChoice::kKeys}},
                           at::kHalf, 1, 0.2f, 51));
}

TEST(BlockAttentionEmulation, Dropout) {
  check(make_block_problem({.batch = 2, .blocks = 2, .block = 16}, {kSorted, kOwn}, at::kBFloat16,
                           1, 0.3f, 8));
  check(make_block_problem({.blocks = 2, .block = 37}, {{.first_offset = -1}}, at::kBFloat16, 1,
                           0.3f, 9));
}

TEST(BlockAttentionEmulation, QueriesWithoutAVisibleKeyGiveZero) {
  const BlockProblem problem = make_block_problem(
      {.heads = 2, .blocks = 2, .block = 24}, {{.mask = KeyChoice::kQueries}}, at::kHalf, 1, 0, 15);
  check(problem);
  const at::Tensor blind =
      problem.attention.keys[0].mask_BHNbb[0].expand({1, 2, 2, 24, 24}).any(4).logical_not();
  EXPECT_TRUE(blind.any().item<bool>());
  const auto results = solve_emulated(problem);
  for (const std::size_t i : {0, 1}) {  // out, d_q
    EXPECT_EQ(results[i].masked_select(blind.unsqueeze(4)).abs().max().item<float>(), 0);
  }
}

// Queries that see a NaN are NaN, in outputs and gradients.
TEST(BlockAttentionEmulation, NaNIsNotHidden) {
  for (const bool of_query : {true, false}) {
    const BlockProblem problem =
        make_block_problem({.blocks = 2, .block = 24}, {kOwn}, at::kBFloat16, 1, 0, 16);
    const at::Tensor& x = of_query ? problem.attention.q_BHNbD : problem.attention.keys[0].k_BHNbD;
    x.detach()[0][0][1][5][2] = NAN;
    const auto results = solve_emulated(problem);
    at::Tensor sees = at::zeros({2, 24}, at::kBool);
    sees[1].narrow(0, 5, of_query ? 1 : 19).fill_(true);
    for (const std::size_t i : {0, 1}) {  // out, d_q
      const at::Tensor is_nan = results[i].isnan()[0][0];
      EXPECT_TRUE(is_nan.masked_select(sees.unsqueeze(2)).all().item<bool>()) << i;
      EXPECT_FALSE(is_nan[0].any().item<bool>()) << i;
    }
    EXPECT_TRUE(at::equal(results[0].isnan()[0][0].any(2), sees));
  }
}

TEST(BlockAttentionEmulation, HalfPrecision) {
  check(make_block_problem({.blocks = 2, .block = 48}, {kSorted, kOwn}, at::kHalf, 1, 0, 10));
}

TEST(BlockAttentionEmulation, WideHeads) {
  check(
      make_block_problem({.block = 64, .head_dim = 256}, {kSorted, kOwn}, at::kBFloat16, 1, 0, 11));
  check(make_block_problem({.blocks = 2, .block = 32, .head_dim = 256},
                           {{.first_offset = -1, .last_offset = 1}}, at::kBFloat16, 1, 0, 12));
}

TEST(BlockAttentionEmulation, SlidingWindows) {
  const KeyChoice causal{.first_offset = -2, .causal = true, .mask = KeyChoice::kNear};
  const KeyChoice encoder{.first_offset = -2, .last_offset = 2, .mask = KeyChoice::kNear};
  check(make_block_problem({.heads = 2, .blocks = 4, .block = 32}, {causal}, at::kBFloat16, 1, 0.2f,
                           17));
  check(make_block_problem({.batch = 2, .blocks = 3, .block = 64, .head_dim = 128}, {encoder},
                           at::kHalf, 1, 0, 18));
}

TEST(BlockAttentionEmulation, RandomProblems) {
  for (int seed = 100; seed < 107; ++seed) {
    check(random_block_problem(seed, seed % 3 == 0 ? at::kHalf : at::kBFloat16, 64, 128));
  }
}

// With kernels that own their keys, and with one for queries and one for keys.
TEST(BlockAttentionEmulation, Sinks) {
  const KeyChoice window{.first_offset = -1, .causal = true, .mask = KeyChoice::kPairs};
  check(with_sink(make_block_problem({.batch = 2, .heads = 2, .blocks = 2, .block = 37},
                                     {kSorted, kOwn}, at::kBFloat16, 1, 0.2f, 20),
                  20));
  check(with_sink(make_block_problem({.heads = 3, .blocks = 3, .block = 32, .head_dim = 40},
                                     {window}, at::kHalf, 3, 0, 21),
                  21));
  BlockProblem added = make_block_problem({.heads = 2, .blocks = 2, .block = 24}, {kOwn, kSorted},
                                          at::kBFloat16, 1, 0, 22);
  added.attention.one_softmax = false;
  check(with_sink(added, 22));
}

// Also if the sink's exponential is infinite.
TEST(BlockAttentionEmulation, ASinkAloneGivesZero) {
  BlockProblem problem =
      with_sink(make_block_problem({.heads = 2, .blocks = 2, .block = 24},
                                   {{.mask = KeyChoice::kQueries}}, at::kBFloat16, 1, 0, 15),
                15);
  problem.attention.sink_H.detach()[1] = 100;
  check(problem);
  const at::Tensor blind =
      problem.attention.keys[0].mask_BHNbb[0].expand({1, 2, 2, 24, 24}).any(4).logical_not();
  EXPECT_TRUE(blind.any().item<bool>());
  const auto results = solve_emulated(problem);
  for (const std::size_t i : {0, 1}) {  // out, d_q
    EXPECT_EQ(results[i].masked_select(blind.unsqueeze(4)).abs().max().item<float>(), 0);
  }
}

TEST(BlockAttentionEmulation, GroupedQueries) {
  const KeyChoice window{.first_offset = -1, .causal = true, .mask = KeyChoice::kNear};
  for (const bool sink : {false, true}) {
    for (const auto& problem :
         {make_block_problem(
              {.batch = 2, .heads = 2, .blocks = 2, .block = 32, .head_dim = 40, .group = 2},
              {kSorted, {.causal = true, .mask = KeyChoice::kQueries}}, at::kBFloat16, 1, 0.2f, 23),
          make_block_problem({.heads = 2, .blocks = 3, .block = 37, .group = 3}, {window},
                             at::kHalf, 1, 0, 24)}) {
      check(sink ? with_sink(problem, 25) : problem);
    }
  }
}

// One block of keys for all blocks of queries, read with a stride of 0.
TEST(BlockAttentionEmulation, BlocksThatShareTheirKeys) {
  BlockProblem problem = make_block_problem({.batch = 2, .heads = 2, .blocks = 3, .block = 32},
                                            {kSorted, {}}, at::kBFloat16, 1, 0, 26);
  KeyBlocks& shared = problem.attention.keys.front();
  for (at::Tensor* x : {&shared.k_BHNbD, &shared.v_BHNbD}) {
    *x = x->detach().narrow(2, 0, 1).expand_as(*x);
  }
  check(problem.to(at::kBFloat16));
}

TEST(BlockAttentionEmulation, RelativePositions) {
  const KeyChoice window{.first_offset = -1, .causal = true, .mask = KeyChoice::kPairs},
      encoder{.first_offset = -1, .last_offset = 1},
      one_and_a_half{.first_offset = -2, .causal = true, .mask = KeyChoice::kNear};
  check(with_relative(make_block_problem({.batch = 2, .heads = 2, .blocks = 2, .block = 37},
                                         {kSorted, kOwn}, at::kBFloat16, 1, 0.2f, 30),
                      9, -8, false, 30));
  check(with_sink(
      with_distance_bias(
          with_relative(make_block_problem({.heads = 2, .blocks = 3, .block = 32, .group = 2},
                                           {encoder}, at::kHalf, 1, 0, 31),
                        41, -20, true, 31),
          31),
      31));
  check(with_distance_bias(
      with_relative(make_block_problem({.batch = 2, .heads = 2, .blocks = 2, .block = 70}, {window},
                                       at::kBFloat16, 3, 0.3f, 32),
                    65, -64, true, 32),
      32));
  BlockProblem added = make_block_problem({.heads = 2, .blocks = 2, .block = 24, .head_dim = 40},
                                          {kOwn, kSorted}, at::kBFloat16, 1, 0, 33);
  added.attention.one_softmax = false;
  check(with_relative(added, 5, -2, false, 33));
  check(with_distance_bias(with_relative(added, 5, -2, false, 33), 33));
  // A table longer than the window.
  check(with_distance_bias(
      with_relative(make_block_problem({.heads = 2, .blocks = 4, .block = 32}, {one_and_a_half},
                                       at::kBFloat16, 1, 0, 34),
                    200, -199, false, 34),
      34));
}

// In one kernel for queries and one for keys, whatever the keys.
TEST(BlockAttentionEmulation, RelativePositionsOfValues) {
  const KeyChoice window{.first_offset = -1, .causal = true, .mask = KeyChoice::kPairs},
      encoder{.first_offset = -1, .last_offset = 1};
  check(with_relative(make_block_problem({.batch = 2, .heads = 2, .blocks = 2, .block = 37},
                                         {kSorted, kOwn}, at::kBFloat16, 1, 0.2f, 50),
                      9, -8, false, 50, true));
  check(
      with_sink(with_relative(make_block_problem({.heads = 2, .blocks = 3, .block = 32, .group = 2},
                                                 {encoder}, at::kHalf, 1, 0, 51),
                              41, -20, true, 51, true),
                51));
  check(with_distance_bias(with_relative(make_block_problem({.heads = 2, .blocks = 3, .block = 32},
                                                            {encoder}, at::kBFloat16, 1, 0, 51),
                                         41, -20, true, 51, true),
                           51));
  // Two tiles of queries, and keys that many queries do not see.
  check(with_relative(make_block_problem({.batch = 2, .heads = 2, .blocks = 2, .block = 70},
                                         {window}, at::kBFloat16, 3, 0.3f, 52),
                      65, -64, true, 52, true));
  check(with_relative(make_block_problem({.heads = 2, .blocks = 2, .block = 24},
                                         {{.mask = KeyChoice::kQueries}}, at::kHalf, 1, 0, 15),
                      11, -5, false, 53, true));
  BlockProblem added = make_block_problem({.heads = 2, .blocks = 2, .block = 24, .head_dim = 40},
                                          {kOwn, kSorted}, at::kBFloat16, 1, 0, 54);
  added.attention.one_softmax = false;
  check(with_relative(added, 5, -2, false, 54, true));
  for (const std::int64_t head_dim : {128, 256}) {
    check(with_sink(
        with_relative(
            make_block_problem({.blocks = 2, .block = 32, .head_dim = head_dim, .group = 2},
                               {{.first_offset = -1, .causal = true}}, at::kBFloat16, 1, 0.2f, 55),
            33, -32, true, 55, true),
        55));
  }
}

// Rows of a tile after the block's last query belong to no query: their sums are nowhere.
TEST(BlockAttentionEmulation, SumsByDistanceOfOneBlockAreItsOwn) {
  for (const bool values : {false, true}) {
    const BlockProblem problem = with_relative(
        make_block_problem({.blocks = 2, .block = 24}, {kOwn}, at::kBFloat16, 1, 0, 58), 9, -8,
        false, 58, values);
    problem.attention.keys[0].v_BHNbD.detach()[0][0][0].fill_(NAN);
    const auto results = solve_emulated(problem);
    for (const std::size_t i : {0, 1}) {  // out, d_q
      EXPECT_TRUE(results[i].select(2, 1).isfinite().all().item<bool>()) << i;
      EXPECT_TRUE(results[i].select(2, 0).isnan().any().item<bool>()) << i;
    }
  }
}

// Logits that grow from tile to tile: earlier sums are relative to an earlier maximum.
TEST(BlockAttentionEmulation, SumsByDistanceOfGrowingLogits) {
  BlockProblem problem = make_block_problem({.blocks = 2, .block = 140}, {{.first_offset = -1}},
                                            at::kBFloat16, 1, 0, 56);
  const at::Tensor size = at::arange(1, 281).view({1, 1, 2, 140, 1}) / 70.0;
  problem.attention.keys[0].k_BHNbD = problem.attention.keys[0].k_BHNbD.detach() * size;
  problem = problem.to(at::kBFloat16);
  check(with_relative(problem, 31, -15, true, 56, true));
}

// Rows are padded to a multiple of 8 columns.
TEST(BlockAttentionEmulation, HeadsOfAnyNumberOfChannels) {
  for (const std::int64_t head_dim : {1, 33, 129}) {
    BlockProblem problem = with_relative(
        make_block_problem({.heads = 2, .blocks = 2, .block = 24, .head_dim = head_dim},
                           {kSorted, kOwn}, at::kBFloat16, 1, 0.2f, 57),
        9, -8, true, 57, true);
    check(with_sink(problem, 57));
  }
}

// Distances that are all clipped to one row.
TEST(BlockAttentionEmulation, TablesOfOneRow) {
  for (const auto& [rows, least] : {std::pair{1, 0}, {3, -500}, {3, 500}}) {
    for (const bool values : {false, true}) {
      const BlockProblem problem = with_relative(
          make_block_problem({.blocks = 2, .block = 24}, {kOwn}, at::kBFloat16, 1, 0, 35), rows,
          least, false, 35, values);
      check(with_sink(problem, 35));  // without a sink the gradient of keys' table is 0
      check(with_sink(with_distance_bias(problem, 37), 35));
    }
  }
}

TEST(BlockAttentionEmulation, WideHeadsWithAllTerms) {
  check(with_sink(
      with_relative(
          make_block_problem({.blocks = 2, .block = 32, .head_dim = 256, .group = 2},
                             {{.first_offset = -1, .causal = true}}, at::kBFloat16, 1, 0, 36),
          33, -32, true, 36),
      36));
}

// What the kernels do not support, so that the reference computes it.
TEST(BlockAttentionEmulation, TablesThatTheKernelsRefuse) {
  const BlockAttention fits =
      with_relative(make_block_problem({.block = 16}, {kOwn, kOwn}, at::kBFloat16, 1, 0, 37), 3, -2,
                    false, 37)
          .attention;
  EXPECT_EQ(why_not_gpu_kernels(fits), "");
  BlockAttention twice = fits;
  for (KeyBlocks& keys : twice.keys) keys.in_place = true;
  EXPECT_EQ(why_not_gpu_kernels(twice), "relative positions apply to several sources of keys");
  twice.one_softmax = false;
  EXPECT_EQ(why_not_gpu_kernels(twice), "");
}

TEST(BlockAttentionEmulation, SameBitsInAnyOrderOfThreads) {
  for (const auto& problem :
       {with_relative(make_block_problem({.blocks = 2, .block = 37}, {kSorted, kOwn}, at::kBFloat16,
                                         1, 0, 13),
                      9, -4, false, 13),
        with_relative(
            make_block_problem({.blocks = 2, .block = 70}, {kOwn}, at::kBFloat16, 1, 0.2f, 49), 9,
            -4, false, 49, true),
        make_block_problem({.blocks = 2, .block = 96}, {kSorted, kOwn}, at::kBFloat16, 1, 0.2f, 48),
        make_block_problem({.blocks = 2, .block = 65, .group = 2}, {{.first_offset = -1}},
                           at::kBFloat16, 1, 0, 14)}) {
    const auto forwards = solve_emulated(problem), backwards = solve_emulated(problem, true);
    for (std::size_t i = 0; i < forwards.size(); ++i) {
      EXPECT_TRUE(at::equal(forwards[i], backwards[i])) << problem.name << " tensor " << i;
    }
  }
}

}  // namespace
}  // namespace birkhoff::test
