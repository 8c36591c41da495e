// The registered features: ids of Python classes, and their rules.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "inspect/callouts.h"
#include "inspect/config.h"

namespace te::inspect {

// How the configuration of a feature for one tensor and gemm is parsed.
enum class Parsing {
  Engine,   // config_for()
  Feature,  // the feature's own parse_config_and_api, through FeatureCall
  Nobody,   // the feature gets its body as written, if config_for() finds that it covers the target
};

struct Feature {
  FeatureId id = 0;
  FeatureRule rule;
  std::set<std::string, std::less<>> apis;
  Parsing parsing = Parsing::Nobody;
  std::string origin;  // the file that defines it
};

class Registry {
 public:
  // Returns false and changes nothing if the namespace already has a feature of the name.
  bool add(Feature feature);
  void remove(FeatureId id);

  const Feature* find(std::string_view ns, std::string_view name) const;
  const Feature* find(FeatureId id) const;
  const std::vector<Feature>& features() const { return features_; }
  std::vector<FeatureRule> rules() const;

  // Whether any feature of the namespace has this method.
  bool has_api(std::string_view ns, std::string_view api) const;

 private:
  std::vector<Feature> features_;  // in the order of registration
};

}  // namespace te::inspect
