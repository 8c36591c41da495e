// Routing calls: the answers of features are merged, cached until they may change, and never asked
// for twice in an iteration.
#include "core/error.h"
#include "fakes.h"

namespace te::inspect {
namespace {

class DecisionsTest : public InspectTest {
 protected:
  void SetUp() override {
    add(feature("A"));
    add(feature("B"));
    session = begin(R"(
s:
  enabled: true
  layers: {layer_types: [fc1]}
  ns:
    A: {enabled: true, gemms: [fprop], tensors: [weight]}
    B: {enabled: true, gemms: [fprop], tensors: [weight]}
)");
  }

  void answer(const std::string& name, std::function<Answer(int64_t)> script) {
    features->answers[name] = std::move(script);
  }

  std::shared_ptr<Session> session;
  const Target inspect{"ns", "inspect_tensor_enabled", "fc1", "weight", std::nullopt};
  const Target fp8{"ns", "fp8_gemm_enabled", "fc1", std::nullopt, "fprop"};
};

TEST_F(DecisionsTest, DefaultsWithoutFeatures) {
  const Target other{"ns", "inspect_tensor_enabled", "qkv", "weight", std::nullopt};
  EXPECT_FALSE(session->decide(other, 0)->yes);
  EXPECT_EQ(session->decide(other, 0)->next, std::nullopt);
  EXPECT_TRUE(session->decide({"ns", "fp8_gemm_enabled", "qkv", std::nullopt, "fprop"}, 0)->yes);
}

TEST_F(DecisionsTest, MergesAnswers) {
  for (const bool a : {false, true}) {
    for (const bool b : {false, true}) {
      const int64_t iteration = 2 * a + b;
      answer("A", [a](int64_t i) { return Answer{a, i + 1}; });
      answer("B", [b](int64_t i) { return Answer{b, i + 1}; });
      EXPECT_EQ(session->decide(inspect, iteration)->yes, a || b);
      EXPECT_EQ(session->decide(fp8, iteration)->yes, a && b);
    }
  }
}

TEST_F(DecisionsTest, AYesIsForOneIterationAndNobodyIsAskedBeforeTheNext) {
  answer("A", [](int64_t i) { return Answer{true, i + 2}; });
  answer("B", [](int64_t) { return Answer{false, std::nullopt}; });
  for (int64_t i = 0; i < 4; ++i) {
    for (int repeat = 0; repeat < 3; ++repeat)
      EXPECT_EQ(session->decide(inspect, i)->yes, i % 2 == 0);
    EXPECT_EQ(session->decide(inspect, i)->next, i - i % 2 + 2);
  }
  EXPECT_EQ(features->asked,
            (std::vector<std::string>{"A inspect_tensor_enabled 0", "B inspect_tensor_enabled 0",
                                      "A inspect_tensor_enabled 2"}));
}

TEST_F(DecisionsTest, AYesWithoutANextIsTheLastOne) {
  answer("A", [](int64_t) { return Answer{true, std::nullopt}; });
  answer("B", [](int64_t) { return Answer{true, std::nullopt}; });
  for (int64_t i = 3; i < 6; ++i) EXPECT_EQ(session->decide(inspect, i)->yes, i == 3);
  EXPECT_EQ(features->asked.size(), 2u);
}

TEST_F(DecisionsTest, WhetherAGemmRunsInFp8HoldsUntilTheNext) {
  answer("A", [](int64_t i) { return Answer{i >= 4, 4}; });
  answer("B", [](int64_t) { return Answer{true, std::nullopt}; });
  for (int64_t i = 0; i < 4; ++i) EXPECT_FALSE(session->decide(fp8, i)->yes);
  EXPECT_TRUE(session->decide(fp8, 4)->yes);
  answer("A", [](int64_t) { return Answer{true, std::nullopt}; });
  for (int64_t i = 5; i < 9; ++i) EXPECT_TRUE(session->decide(fp8, i)->yes);
  EXPECT_EQ(features->asked.size(), 4u);
}

TEST_F(DecisionsTest, AnAnswerOfThePastHoldsForItsIteration) {
  answer("A", [](int64_t i) { return Answer{true, i}; });
  answer("B", [](int64_t) { return Answer{false, 0}; });
  EXPECT_EQ(session->decide(inspect, 5)->next, 6);
  EXPECT_EQ(session->decide(inspect, 5)->next, 6);
  EXPECT_EQ(features->asked.size(), 2u);
}

TEST_F(DecisionsTest, AsksAgainWhenTheCounterIsSetBack) {
  answer("A", [](int64_t i) { return Answer{i >= 5, std::nullopt}; });
  answer("B", [](int64_t) { return Answer{false, std::nullopt}; });
  EXPECT_TRUE(session->decide(inspect, 7)->yes);
  EXPECT_FALSE(session->decide(inspect, 2)->yes);
}

TEST_F(DecisionsTest, ACallReachesThoseThatSaidYes) {
  answer("A", [](int64_t i) { return Answer{i == 1, i + 1}; });
  answer("B", [](int64_t i) { return Answer{i <= 1, i + 1}; });
  const Target call{"ns", "inspect_tensor", "fc1", "weight", std::nullopt};
  const auto names = [&](int64_t iteration) {
    std::string text;
    for (const RoutedUse* use : session->active(call, iteration)) text += use->feature->rule.name;
    return text;
  };
  EXPECT_EQ(names(0), "B");
  EXPECT_EQ(names(1), "AB");
  EXPECT_EQ(names(2), "");
}

TEST_F(DecisionsTest, OnlyOneFeatureModifies) {
  answer("A", [](int64_t i) { return Answer{true, i + 1}; });
  answer("B", [](int64_t i) { return Answer{i > 0, i + 1}; });
  const Target call{"ns", "modify_tensor", "fc1", "weight", "fprop"};
  EXPECT_EQ(session->active(call, 0).size(), 1u);
  EXPECT_THROW(session->active(call, 1), Error);
}

TEST_F(DecisionsTest, WhatAFeatureThrowsPassesAndLeavesNoDecision) {
  answer("A", [](int64_t) -> Answer { throw std::runtime_error("mine"); });
  answer("B", [](int64_t) { return Answer{true, std::nullopt}; });
  EXPECT_THROW(session->decide(inspect, 0), std::runtime_error);
  answer("A", [](int64_t) { return Answer{false, std::nullopt}; });
  EXPECT_TRUE(session->decide(inspect, 0)->yes);
}

}  // namespace
}  // namespace te::inspect
