#include "cluster/operation_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

namespace birkhoff {
namespace {

TEST(OperationQueue, ACallerRunsItsOperationAfterThoseBefore) {
  OperationQueue queue;
  std::vector<int> order;
  std::thread::id ran_on;
  const auto first = queue.submit([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    order.push_back(1);
  });
  const double waited_before = waited_seconds();
  queue.run_here([&] {
    order.push_back(2);
    ran_on = std::this_thread::get_id();
  });
  EXPECT_GT(waited_seconds() - waited_before, 0.01);  // this thread may have been off its core
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
  EXPECT_EQ(ran_on, std::this_thread::get_id());
  EXPECT_FALSE(queue.busy());
  first->wait();
  queue.submit([&] { order.push_back(3); })->wait();
  EXPECT_EQ(order.back(), 3);
}

// The ranks no longer agree on the order.
TEST(OperationQueue, AfterAFailureNothingRuns) {
  for (const bool on_caller : {true, false}) {
    OperationQueue queue;
    const auto start = [&](bool caller, const std::function<void()>& operation) {
      caller ? queue.run_here(operation) : queue.submit(operation)->wait();
    };
    EXPECT_THROW(start(on_caller, [] { throw std::runtime_error("lost"); }), std::runtime_error);
    for (const bool next : {true, false}) {
      EXPECT_THROW(start(next, [] { ADD_FAILURE() << "ran"; }), std::runtime_error);
    }
  }
}

TEST(OperationQueue, OneOperationAtATime) {
  OperationQueue queue;
  std::atomic<int> running = 0, done = 0;
  const auto operation = [&] {
    EXPECT_EQ(++running, 1);
    std::this_thread::yield();
    EXPECT_EQ(--running, 0);
    ++done;
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        i % 3 == 0 ? queue.submit(operation)->wait() : queue.run_here(operation);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(done, 900);
}

// An operation that sleeps while others compute continues as soon as one of them waits for it.
TEST(OperationQueue, SleepEndsWhenAThreadBeginsToWait) {
  using std::chrono::seconds, std::chrono::steady_clock;
  OperationQueue queue;
  std::atomic<bool> sleeps = false;
  const auto work = queue.submit([&] {
    EXPECT_FALSE(queue.awaited());
    sleeps = true;
    queue.sleep(seconds(60));
    EXPECT_TRUE(queue.awaited());
  });
  while (!sleeps) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const auto start = steady_clock::now();
  work->wait();
  EXPECT_LT(steady_clock::now() - start, seconds(30));
  EXPECT_FALSE(queue.awaited());
  // Also if it waits to run its own operation.
  sleeps = false;
  const auto next = queue.submit([&] {
    sleeps = true;
    queue.sleep(seconds(60));
  });
  while (!sleeps) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  queue.run_here([&] {
    EXPECT_TRUE(queue.awaited());
    queue.sleep(std::chrono::microseconds(10));
  });
  next->wait();
  EXPECT_LT(steady_clock::now() - start, seconds(30));
  EXPECT_FALSE(queue.awaited());
}

}  // namespace
}  // namespace birkhoff
