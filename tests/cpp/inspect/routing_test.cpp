// The features that act on a target: those of all sections in file order, limited by gemm and
// tensor. Two sections with the same feature for one target are refused.
#include "core/error.h"
#include "fakes.h"

namespace te::inspect {
namespace {

class Routing : public InspectTest {
 protected:
  void SetUp() override {
    add(feature("A"));
    add(feature("B", {"C"}));
    add(feature("C"));
  }

  std::vector<std::string> names(Session& session, const Target& target) {
    std::vector<std::string> result;
    for (const RoutedUse& use : *session.route(target))
      result.push_back(use.section + "." + use.feature->rule.name);
    return result;
  }
};

using Names = std::vector<std::string>;

constexpr const char* kTwoSections = R"(
first:
  enabled: true
  layers: {layer_types: [fc1]}
  ns:
    A: {enabled: true, gemms: [fprop], tensors: [weight]}
second:
  enabled: true
  layers: {layer_types: [fc]}
  ns:
    B: {enabled: true, gemms: [fprop, dgrad], tensors: [weight, activation], freq: 3}
asleep:
  enabled: false
  layers: {layer_types: [fc]}
  ns:
    C: {enabled: true, gemms: [fprop], tensors: [weight]}
)";

TEST_F(Routing, MergesSectionsInFileOrder) {
  const auto session = begin(kTwoSections);
  EXPECT_EQ(names(*session, {"ns", "modify_tensor", "fc1", "weight", "fprop"}),
            (Names{"first.A", "second.B"}));
  EXPECT_EQ(names(*session, {"ns", "modify_tensor", "fc2", "weight", "fprop"}),
            (Names{"second.B"}));
  EXPECT_EQ(names(*session, {"ns", "modify_tensor", "qkv", "weight", "fprop"}), Names{});
  EXPECT_EQ(names(*session, {"other", "modify_tensor", "fc1", "weight", "fprop"}), Names{});
  EXPECT_EQ(names(*session, {"ns", "unknown_call", "fc1", "weight", "fprop"}), Names{});
  EXPECT_EQ(session->layers(), (Names{"fc1", "fc2", "qkv"}));
}

TEST_F(Routing, GemmsLimitOnlyHooksThatCarryOne) {
  const auto session = begin(kTwoSections);
  EXPECT_EQ(names(*session, {"ns", "modify_tensor", "fc1", "weight", "wgrad"}), Names{});
  EXPECT_EQ(names(*session, {"ns", "inspect_tensor", "fc1", "weight", std::nullopt}),
            (Names{"first.A", "second.B"}));
  EXPECT_EQ(names(*session, {"ns", "inspect_tensor", "fc1", "activation", std::nullopt}),
            (Names{"second.B"}));
  EXPECT_EQ(names(*session, {"ns", "fp8_gemm_enabled", "fc1", std::nullopt, "dgrad"}),
            (Names{"second.B"}));
}

TEST_F(Routing, HandsOutWhatIsWrittenForTheTarget) {
  const auto session = begin(kTwoSections);
  const Route route = session->route({"ns", "modify_tensor", "fc2", "weight", "dgrad"});
  ASSERT_EQ(route->size(), 1u);
  const RoutedUse& use = route->front();
  EXPECT_EQ(use.config.find("gemm")->as_string(), "dgrad");
  EXPECT_EQ(use.config.find("tensor")->as_string(), "weight");
  EXPECT_EQ(use.config.find("gemms"), nullptr);
  ASSERT_TRUE(use.schedule);
  EXPECT_TRUE(use.schedule->due(3));
  EXPECT_FALSE(use.schedule->due(4));
  EXPECT_EQ(session->route({"ns", "modify_tensor", "fc2", "weight", "dgrad"}), route)
      << "is computed once";
}

void expect_refused(Session& session, const Target& target, const std::vector<std::string>& words) {
  try {
    session.route(target);
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), Kind::Value);
    for (const std::string& word : words)
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST_F(Routing, RefusesOneFeatureFromTwoSections) {
  const auto session = begin(R"(
one:
  enabled: true
  layers: {layer_types: [fc1]}
  ns: {A: {enabled: true, gemms: [fprop], tensors: [weight]}}
two:
  enabled: true
  layers: {layer_types: [all]}
  ns: {A: {enabled: true, gemms: [fprop, wgrad], tensors: [activation, weight]}}
)");
  expect_refused(*session, {"ns", "modify_tensor", "fc1", "weight", "fprop"},
                 {"one", "two", "fc1", "weight", "fprop"});
  EXPECT_EQ(names(*session, {"ns", "modify_tensor", "fc1", "activation", "fprop"}),
            (Names{"two.A"}));
  EXPECT_EQ(names(*session, {"ns", "modify_tensor", "fc2", "weight", "fprop"}), (Names{"two.A"}));
  // A call without a gemm is refused if both sections act on its tensor in some gemm.
  expect_refused(*session, {"ns", "inspect_tensor", "fc1", "weight", std::nullopt}, {"one", "two"});
  EXPECT_EQ(names(*session, {"ns", "inspect_tensor", "fc1", "activation", std::nullopt}),
            (Names{"two.A"}));
}

TEST_F(Routing, OneFeatureOnDifferentGemmsIsFine) {
  const auto session = begin(R"(
one:
  enabled: true
  layers: {layer_types: [fc1]}
  ns: {A: {enabled: true, gemms: [fprop], tensors: [weight]}}
two:
  enabled: true
  layers: {layer_types: [fc1]}
  ns: {A: {enabled: true, gemms: [dgrad], tensors: [weight]}}
)");
  EXPECT_EQ(names(*session, {"ns", "inspect_tensor", "fc1", "weight", std::nullopt}),
            (Names{"one.A", "two.A"}));
  EXPECT_EQ(names(*session, {"ns", "modify_tensor", "fc1", "weight", "dgrad"}), (Names{"two.A"}));
}

TEST_F(Routing, RefusesFeaturesThatExcludeEachOther) {
  const auto session = begin(R"(
one:
  enabled: true
  layers: {layer_types: [fc1]}
  ns: {B: {enabled: true, gemms: [fprop], tensors: [weight]}}
two:
  enabled: true
  layers: {layer_types: [fc1]}
  ns: {C: {enabled: true, gemms: [fprop], tensors: [weight]}}
)");
  expect_refused(*session, {"ns", "modify_tensor", "fc1", "weight", "fprop"},
                 {"B of section one", "C of section two"});
}

TEST_F(Routing, AFeatureMayParseItself) {
  for (const auto& [name, parsing] :
       {std::pair("Own", Parsing::Feature), {"Raw", Parsing::Nobody}}) {
    Feature free = feature(name);
    free.rule = {.ns = "ns", .name = name};
    free.parsing = parsing;
    add(free);
  }
  const auto session = begin(R"(
one:
  enabled: true
  layers: {layer_types: [fc1]}
  ns: {Own: {enabled: true, anything: 3}, Raw: {enabled: true, tensors: [weight], anything: 4}}
)");
  EXPECT_EQ(names(*session, {"ns", "inspect_tensor", "fc1", "weight", std::nullopt}),
            (Names{"one.Own", "one.Raw"}));
  EXPECT_EQ(names(*session, {"ns", "inspect_tensor", "fc1", "activation", std::nullopt}), Names{});
  const Route route = session->route({"ns", "inspect_tensor", "fc1", "weight", std::nullopt});
  EXPECT_EQ(route->at(0).config.find("anything")->as_int(), 3);
  EXPECT_TRUE(route->at(1).config.find("tensors")->is_sequence()) << "as written";
}

}  // namespace
}  // namespace te::inspect
