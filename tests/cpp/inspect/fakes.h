// A session without Python: features whose answers a test sets, and a sink that stores messages.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "inspect/engine.h"

namespace te::inspect {

// Takes the place of re.search: looks for a substring.
inline bool search(const std::string& part, const std::string& text) {
  return text.find(part) != std::string::npos;
}

class FakeFeatures : public FeatureCall {
 public:
  std::optional<std::string> load(const std::string& file) override {
    loaded.push_back(file);
    if (file.find("broken") != std::string::npos) return "line 1: it is broken";
    return std::nullopt;
  }

  std::optional<Node> parse(FeatureId, const Node& written, const Target& target) override {
    if (target.tensor != "weight") return std::nullopt;
    return written;
  }

  Answer ask(const RoutedUse& use, const Target& target, int64_t iteration) override {
    {
      const std::lock_guard lock(mutex_);
      asked.push_back(use.feature->rule.name + " " + target.api + " " + std::to_string(iteration));
    }
    return answers.at(use.feature->rule.name)(iteration);
  }

  std::map<std::string, std::function<Answer(int64_t)>> answers;  // by feature
  std::vector<std::string> loaded, asked;

 private:
  std::mutex mutex_;
};

class FakeSink : public Sink {
 public:
  void warn(const std::string& text) override {
    const std::lock_guard lock(mutex_);
    warnings.push_back(text);
  }
  void print(const std::string& line) override {
    const std::lock_guard lock(mutex_);
    lines.push_back(line);
  }

  std::vector<std::string> warnings, lines;

 private:
  std::mutex mutex_;
};

// A temporary folder, which is removed at the end of the test.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "te_inspect_XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }

  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name) << text;
  }

 private:
  std::filesystem::path path_;
};

inline std::string read(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// A feature of the namespace "ns" with all apis, tensors and gemms, a schedule, and no other keys.
inline Feature feature(const std::string& name, std::vector<std::string> conflicts = {}) {
  Feature result;
  result.rule.ns = "ns";
  result.rule.name = name;
  result.rule.free_form = false;
  result.rule.tensors = {"activation", "weight", "gradient", "output", "wgrad", "dgrad"};
  result.rule.takes_gemms = true;
  result.rule.scheduled = true;
  result.rule.conflicts = std::move(conflicts);
  result.apis = {"inspect_tensor", "inspect_tensor_enabled", "fp8_gemm_enabled", "modify_tensor",
                 "modify_tensor_enabled"};
  result.parsing = Parsing::Engine;
  return result;
}

// Sessions with the features that a test adds. Log lines have no timestamps.
class InspectTest : public ::testing::Test {
 protected:
  void add(Feature feature) { ASSERT_TRUE(engine.add(std::move(feature))); }

  std::shared_ptr<Session> begin(const std::string& yaml, LogOptions log = {}) {
    const Registry registry = engine.registry();
    Loaded loaded = load_config(yaml, "config.yaml", registry.rules(), search);
    for (const Problem& problem : loaded.problems) {
      EXPECT_NE(problem.severity, Severity::Error) << describe(problem, "config.yaml");
    }
    log.timestamps = false;
    return engine.begin(std::move(loaded.config), registry, {search, features, sink},
                        std::move(log));
  }

  Engine engine;
  std::shared_ptr<FakeFeatures> features = std::make_shared<FakeFeatures>();
  std::shared_ptr<FakeSink> sink = std::make_shared<FakeSink>();
};

}  // namespace te::inspect
