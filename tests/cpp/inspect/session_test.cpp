// A session as a whole: iterations, messages that are written once, selectors that select nothing,
// threads, and calls of features without a lock.
#include "inspect/session.h"

#include <thread>

#include "fakes.h"
#include "inspect/unmatched.h"

namespace te::inspect {
namespace {

using SessionTest = InspectTest;

constexpr const char* kOneSection = R"(
s:
  enabled: true
  layers: {layer_types: [fc1]}
  ns:
    A: {enabled: true, gemms: [fprop], tensors: [weight]}
)";

TEST_F(SessionTest, CountsSteps) {
  const auto session = begin("{}");
  EXPECT_EQ(session->iteration(), 0);
  session->advance();
  session->settle();
  EXPECT_EQ(session->iteration(), 1);
  session->set_iteration(40);
  session->advance();
  EXPECT_EQ(session->iteration(), 41);
}

TEST_F(SessionTest, EpochsGrow) {
  const uint64_t first = begin("{}")->epoch();
  EXPECT_LT(first, begin("{}")->epoch());
}

TEST_F(SessionTest, KeysAreSaidOncePerSession) {
  const Folder folder;
  LogOptions log;
  log.directory = folder.path();
  for (int run = 0; run < 2; ++run) {
    const auto session = begin("{}", log);
    session->log_message(20, "plan", "fc1", "key");
    session->log_message(20, "another", "fc1", "key");
    session->log_message(20, "each time");
    session->log_message(20, "each time");
    session->log_message(20, "kept\nwhole", "two\nlines");
    EXPECT_EQ(read(folder / "nvdlfw_inspect_logs/nvdlfw_inspect_globalrank-0.log"),
              "INFO - fc1: plan\nINFO - each time\nINFO - each time\n"
              "INFO - two\\u000alines: kept\nwhole\n");
  }
}

TEST_F(SessionTest, WarningsReachTheTerminal) {
  begin("{}")->log_message(30, "careful", "fc1");
  EXPECT_EQ(sink->lines, std::vector<std::string>{"NVDLFW INSPECT - WARNING - fc1: careful"});
}

TEST_F(SessionTest, ReportsSelectorsThatSelectNothingOnce) {
  add(feature("A"));
  const auto session = begin(kOneSection);
  session->route({"ns", "inspect_tensor", "decoder.fc2", "weight", std::nullopt});
  session->route({"ns", "inspect_tensor", "decoder.qkv", "weight", std::nullopt});
  session->settle();
  session->settle();
  ASSERT_EQ(sink->warnings.size(), 1u);
  EXPECT_EQ(sink->warnings[0],
            "[config] section s: layer_types [fc1] selects no layer; did you mean decoder.fc2?");
}

TEST_F(SessionTest, SilentWhereAllSelectorsSelect) {
  add(feature("A"));
  const auto session = begin(kOneSection);
  session->route({"ns", "inspect_tensor", "decoder.fc1", "weight", std::nullopt});
  session->settle();
  EXPECT_TRUE(sink->warnings.empty());
}

TEST(Unmatched, NearMissesAreParts) {
  const std::vector<std::string> layers = {"a.self_attention.proj", "a.layernorm_mlp.fc1",
                                           "a.layernorm_mlp.fc2"};
  EXPECT_EQ(near_misses("self_atention", layers),
            std::vector<std::string>{"a.self_attention.proj"});
  EXPECT_EQ(near_misses("FC1", layers),
            (std::vector<std::string>{"a.layernorm_mlp.fc1", "a.layernorm_mlp.fc2"}));
  EXPECT_TRUE(near_misses("embedding", layers).empty());
}

// Features that call the session, like a feature that logs. If the session held a lock while it
// calls a feature, the test would hang.
class Reentrant : public FakeFeatures {
 public:
  Answer ask(const RoutedUse& use, const Target& target, int64_t iteration) override {
    if (Session* session = inside.lock().get()) {
      session->route({"ns", "fp8_gemm_enabled", target.layer, std::nullopt, "fprop"});
      session->log_message(20, "asked " + use.feature->rule.name, target.layer, "asked");
      session->log_statistic({iteration, target.layer, "weight", "n", "n", 1.0});
      session->flush();
    }
    return {true, iteration + 1};
  }
  std::weak_ptr<Session> inside;
};

TEST_F(SessionTest, ThreadsStepLogAndDecideAtOnce) {
  const auto reentrant = std::make_shared<Reentrant>();
  features = reentrant;
  add(feature("A"));
  const Folder folder;
  LogOptions log;
  log.directory = folder.path();
  const auto session = begin(kOneSection, log);
  reentrant->inside = session;
  constexpr int kSteps = 200;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      for (int step = 0; step < kSteps; ++step) {
        const std::string layer = "fc1." + std::to_string(step % 7);
        session->active({"ns", "inspect_tensor", layer, "weight", std::nullopt},
                        session->iteration());
        session->log_statistic({step, layer, "weight", "min", "thread" + std::to_string(i), 1.0});
        session->log_message(20, "thread " + std::to_string(i));
      }
    });
  }
  for (int step = 0; step < kSteps; ++step) {
    session->advance();
    session->settle();
  }
  for (std::thread& thread : threads) thread.join();
  session->flush();
  EXPECT_EQ(session->iteration(), kSteps);
  std::istringstream rows(read(folder / "statistics_rank-0.jsonl"));
  std::string line;
  int own = 0;
  while (std::getline(rows, line)) {
    ASSERT_TRUE(line.starts_with("{\"iteration\": ") && line.ends_with("\"rank\": 0}")) << line;
    own += line.find("thread") != std::string::npos;
  }
  EXPECT_EQ(own, 3 * kSteps);
}

}  // namespace
}  // namespace te::inspect
