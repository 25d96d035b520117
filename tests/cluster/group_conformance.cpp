#include "tests/cluster/group_conformance.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kLong};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin};

// Rank r's data: values whose sum depends on the order of addition, except for int64. Every rank
// can compute the data of all ranks.
at::Tensor data_of(int rank, std::int64_t count, at::ScalarType dtype) {
  const at::Tensor i = at::arange(count, at::kDouble);
  const at::Tensor values = at::sin(i * 0.7 + rank) * at::exp2((i + 3 * rank).remainder(20));
  return values.to(dtype);
}

// A copy on the group's device.
at::Tensor on_device(const ProcessGroup& group, const at::Tensor& tensor) {
  return tensor.to(group.device(), tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

at::TensorOptions options_of(const ProcessGroup& group, at::ScalarType dtype) {
  return at::TensorOptions().device(group.device()).dtype(dtype);
}

bool holds(const at::Tensor& actual, const at::Tensor& expected) {
  return at::equal(actual.cpu(), expected);
}

// Reduces in rank order; bf16 accumulates in fp32.
at::Tensor reduce_serially(const std::vector<at::Tensor>& parts, ReduceOp op) {
  const at::ScalarType dtype = parts[0].scalar_type();
  const at::ScalarType wide = dtype == at::kBFloat16 ? at::kFloat : dtype;
  at::Tensor result = parts[0].to(wide);
  for (std::size_t r = 1; r < parts.size(); ++r) {
    const at::Tensor part = parts[r].to(wide);
    result = op == ReduceOp::kSum   ? result + part
             : op == ReduceOp::kMax ? at::maximum(result, part)
                                    : at::minimum(result, part);
  }
  return result.to(dtype);
}

// First over the ranks of each node, then over nodes.
at::Tensor reduce_by_nodes(const std::vector<at::Tensor>& parts, ReduceOp op, int node_ranks) {
  std::vector<at::Tensor> sums;
  for (auto node = parts.begin(); node != parts.end(); node += node_ranks) {
    sums.push_back(reduce_serially({node, node + node_ranks}, op));
  }
  return reduce_serially(sums, op);
}

void check_one(ProcessGroup& group, std::int64_t count, at::ScalarType dtype, int node_ranks) {
  const int size = group.size(), rank = group.rank();
  SCOPED_TRACE(
      fmt::format("{} ranks, rank {}, {} elements of {}", size, rank, count, c10::toString(dtype)));
  std::vector<at::Tensor> all, all_wide;
  for (int r = 0; r < size; ++r) {
    all.push_back(data_of(r, count, dtype));
    all_wide.push_back(data_of(r, count * size, dtype));
  }
  const auto self = static_cast<std::size_t>(rank);
  for (const ReduceOp op : kOps) {
    const at::Tensor reduced = on_device(group, all[self]);
    group.all_reduce(reduced, op, "test");
    EXPECT_TRUE(holds(reduced, reduce_by_nodes(all, op, node_ranks)));

    const at::Tensor scattered = at::empty({count}, options_of(group, dtype));
    group.reduce_scatter(scattered, on_device(group, all_wide[self]), op, "test");
    EXPECT_TRUE(holds(
        scattered,
        reduce_by_nodes(all_wide, op, node_ranks).slice(0, rank * count, (rank + 1) * count)));
  }

  const at::Tensor gathered = at::zeros({size * count}, options_of(group, dtype));
  group.all_gather(gathered, on_device(group, all[self]), "test");
  EXPECT_TRUE(holds(gathered, at::cat(all)));
  const at::Tensor in_place = at::zeros({size * count}, options_of(group, dtype));
  const at::Tensor slice = in_place.slice(0, rank * count, (rank + 1) * count);
  slice.copy_(all[self]);
  group.all_gather(in_place, slice, "test");
  EXPECT_TRUE(holds(in_place, at::cat(all)));

  for (int root = 0; root < size; ++root) {
    const at::Tensor copy = on_device(group, all[self]);
    group.broadcast(copy, root, "test");
    EXPECT_TRUE(holds(copy, all[static_cast<std::size_t>(root)]));
  }

  // Rank s sends count + s + 2 d elements to rank d: all counts differ. If count is 0, it sends
  // none to lower ranks.
  const auto num_sent = [count](int from, int to) {
    return count == 0 && to < from ? 0 : count + from + 2 * to;
  };
  const auto block = [&](int from, int to) {
    return data_of(10 * from + to, num_sent(from, to), dtype);
  };
  std::vector<std::int64_t> send_counts, receive_counts;
  std::vector<at::Tensor> sent, expected;
  for (int peer = 0; peer < size; ++peer) {
    send_counts.push_back(num_sent(rank, peer));
    receive_counts.push_back(num_sent(peer, rank));
    sent.push_back(block(rank, peer));
    expected.push_back(block(peer, rank));
  }
  const at::Tensor received = at::empty({at::cat(expected).numel()}, options_of(group, dtype));
  group.all_to_all(received, receive_counts, on_device(group, at::cat(sent)), send_counts, "test");
  EXPECT_TRUE(holds(received, at::cat(expected)));
}

}  // namespace

void check_operations(ProcessGroup& group, int node_ranks) {
  const std::int64_t size = group.size();
  for (const std::int64_t count : {std::int64_t{0}, std::int64_t{1}, size - 1, size + 1,
                                   std::int64_t{1500}, std::int64_t{100003}}) {
    for (const at::ScalarType dtype : kDtypes) check_one(group, count, dtype, node_ranks);
  }
  // A NaN of any rank reaches all ranks, whatever the reduction.
  for (const ReduceOp op : kOps) {
    const at::Tensor x = at::ones({5}, options_of(group, at::kFloat));
    if (group.rank() == group.size() - 1) x[3] = std::nan("");
    group.all_reduce(x, op, "nan");
    EXPECT_EQ(at::isnan(x).sum().item<std::int64_t>(), 1);
    EXPECT_TRUE(at::isnan(x[3]).item<bool>());
  }
  group.barrier("test");
}

void check_bytes(ProcessGroup& group) {
  const auto bytes_of = [](int rank) {
    return rank == 1
               ? std::string()
               : std::string("rank \0", 6) + std::string(static_cast<std::size_t>(5 * rank), 'x');
  };
  const std::vector<std::string> all = group.all_gather_bytes(bytes_of(group.rank()), "test");
  ASSERT_EQ(static_cast<int>(all.size()), group.size());
  for (int r = 0; r < group.size(); ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], bytes_of(r));
  for (int root = 0; root < group.size(); ++root) {
    EXPECT_EQ(group.broadcast_bytes(bytes_of(group.rank()), root, "test"), bytes_of(root));
  }
}

void check_overlap(ProcessGroup& group) {
  const std::int64_t size = group.size();
  std::vector<at::Tensor> tensors;
  std::vector<std::unique_ptr<Work>> works;
  for (std::int64_t k = 0; k < 20; ++k) {
    tensors.push_back(at::full({1 + 7919 * k}, static_cast<double>(k + group.rank()),
                               options_of(group, at::kFloat)));
    works.push_back(group.all_reduce_async(tensors.back(), ReduceOp::kSum, "overlap"));
  }
  const at::Tensor gathered = at::empty({size}, options_of(group, at::kFloat));
  const at::Tensor mine =
      at::full({1}, static_cast<double>(group.rank()), options_of(group, at::kFloat));
  works.push_back(group.all_gather_async(gathered, mine, "overlap"));
  for (std::size_t k = works.size(); k-- > 0;) works[k]->wait();
  for (std::int64_t k = 0; k < 20; ++k) {
    const auto sum = static_cast<double>(size * k + size * (size - 1) / 2);
    const at::Tensor& tensor = tensors[static_cast<std::size_t>(k)];
    EXPECT_TRUE(at::equal(tensor, at::full_like(tensor, sum)));
  }
  EXPECT_TRUE(holds(gathered, at::arange(size, at::kFloat)));
}

void check_ring(ProcessGroup& group) {
  const std::int64_t operations = group.ring().total_operations();
  at::Tensor x = at::ones({2, 3}, options_of(group, at::kDouble));
  const auto work = group.all_reduce_async(x, ReduceOp::kSum, "gradients");
  EXPECT_FALSE(group.ring().entries().back().done);
  work->wait();
  group.barrier("end of step");
  const std::vector<OperationRing::Entry> entries = group.ring().entries();
  const OperationRing::Entry& reduce = entries[entries.size() - 2];
  EXPECT_EQ(reduce.sequence, operations);
  EXPECT_EQ(reduce.operation, "all_reduce");
  EXPECT_EQ(reduce.name, "gradients");
  EXPECT_THAT(reduce.shape, testing::ElementsAre(2, 3));
  EXPECT_EQ(reduce.bytes, 48);
  EXPECT_TRUE(reduce.done);
  EXPECT_EQ(entries.back().operation, "barrier");
  EXPECT_EQ(entries.back().name, "end of step");
  EXPECT_TRUE(entries.back().done);
  EXPECT_EQ(group.ring().total_operations(), operations + 2);
  for (int i = 0; i < 300; ++i) group.broadcast(x, 0, "many");
  EXPECT_EQ(group.ring().entries().size(), OperationRing::kCapacity);
  EXPECT_EQ(group.ring().entries().back().sequence, operations + 301);
  EXPECT_EQ(group.ring().entries().front().sequence,
            operations + 302 - static_cast<std::int64_t>(OperationRing::kCapacity));
}

void check_misuse(ProcessGroup& group) {
  const std::int64_t size = group.size();
  const at::Tensor x = at::ones({4, 6});
  const auto expect_refused = [](const std::function<void()>& action, const std::string& why) {
    try {
      action();
      ADD_FAILURE() << "accepted: " << why;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kInternal);
      EXPECT_THAT(error.what(), testing::HasSubstr("'misused'"));
      EXPECT_THAT(error.what(), testing::HasSubstr(why));
    }
  };
  const std::int64_t operations = group.ring().total_operations();
  const auto reduce = [&](const at::Tensor& tensor) {
    group.all_reduce(tensor, ReduceOp::kSum, "misused");
  };
  expect_refused([&] { reduce(at::Tensor()); }, "undefined");
  expect_refused([&] { reduce(x.t()); }, "contiguous");
  expect_refused([&] { reduce(x.to(at::kInt)); }, "dtype");
  expect_refused([&] { group.broadcast(x, static_cast<int>(size), "misused"); }, "root");
  expect_refused([&] { group.all_gather(at::empty({size + 1}), at::ones({1}), "misused"); },
                 "times");
  expect_refused(
      [&] { group.all_gather(at::empty({size}), at::ones({1}, at::kDouble), "misused"); },
      "differ in dtype");
  expect_refused(
      [&] {
        group.reduce_scatter(at::empty({2}), at::ones({2 * size + 1}), ReduceOp::kMax, "misused");
      },
      "times");
  std::vector<std::int64_t> counts(static_cast<std::size_t>(size), 1);
  const at::Tensor row = at::ones({size});
  expect_refused([&] { group.all_to_all(at::empty({size + 1}), counts, row, counts, "misused"); },
                 "add up");
  counts[0] = -1;
  expect_refused([&] { group.all_to_all(at::empty({size}), counts, row, counts, "misused"); },
                 "negative");
  counts.push_back(1);
  expect_refused([&] { group.all_to_all(at::empty({size}), counts, row, counts, "misused"); },
                 "one count per rank");
  EXPECT_EQ(group.ring().total_operations(), operations);
}

}  // namespace birkhoff
