#include "tests/cluster/mpi_test_main.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "cluster/base/error.h"

namespace birkhoff {
namespace {

World* world = nullptr;

int expected_ranks() {
  const char* ranks = std::getenv("BIRKHOFF_TEST_RANKS");
  return ranks == nullptr ? announced_ranks() : std::atoi(ranks);
}

// After a fatal failure, such as an exception, the other ranks may wait for this one forever.
class AbortAfterException : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo& info) override {
    for (int i = 0; i < info.result()->total_part_count(); ++i) {
      const testing::TestPartResult& part = info.result()->GetTestPartResult(i);
      if (part.fatally_failed()) {
        std::fprintf(stderr, "rank %d: %s.%s failed fatally, all ranks end\n", world->rank(),
                     info.test_suite_name(), info.name());
        world->abort(1);
      }
    }
  }
};

// Ranks other than 0 print only failures.
class PrintFailures : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& part) override {
    if (!part.failed()) return;
    const char* file = part.file_name();
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", world->rank(), file != nullptr ? file : "?",
                 part.line_number(), part.message());
  }
};

}  // namespace

World& test_world() { return *world; }

}  // namespace birkhoff

int main(int argc, char** argv) {
  using namespace birkhoff;
  testing::InitGoogleTest(&argc, argv);
  World the_world;
  world = &the_world;
  if (the_world.size() != expected_ranks()) {
    std::fprintf(stderr, "this test wants %d ranks and has %d\n", expected_ranks(),
                 the_world.size());
    the_world.abort(1);
  }
  testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
  if (the_world.rank() != 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new PrintFailures);
  }
  listeners.Append(new AbortAfterException);
  at::Tensor failed = at::full({1}, RUN_ALL_TESTS() != 0 ? 1 : 0, at::TensorOptions(at::kLong));
  the_world.group().all_reduce(failed, ReduceOp::kMax, "test result");
  return static_cast<int>(*failed.const_data_ptr<std::int64_t>());
}
