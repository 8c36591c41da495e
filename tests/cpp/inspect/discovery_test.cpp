// Feature files are found in order and loaded once, and a broken one does not stop the others.
#include "inspect/discovery.h"

#include "core/error.h"
#include "fakes.h"

namespace te::inspect {
namespace {

TEST(Discovery, FindsPythonFilesInOrder) {
  const Folder folder;
  for (const char* name : {"b.py", "a.py", "sub/c.py", "sub/__init__.py", "notes.txt", ".git/d.py",
                           "__pycache__/e.py"}) {
    folder.write(name, "");
  }
  std::vector<std::string> names;
  for (const auto& file : feature_files(folder.path())) {
    names.push_back(std::filesystem::relative(file, folder.path()).string());
  }
  EXPECT_EQ(names, (std::vector<std::string>{"a.py", "b.py", "sub/__init__.py", "sub/c.py"}));
}

TEST(Discovery, LoadsEachFileOnceAndReportsBrokenOnes) {
  const Folder folder;
  for (const char* name : {"a.py", "broken.py", "z.py"}) folder.write(name, "");
  FakeFeatures features;
  const auto broken = discover({folder.path(), folder / ".", folder.path()}, features);
  EXPECT_EQ(features.loaded.size(), 3u);
  ASSERT_EQ(broken.size(), 1u);
  EXPECT_EQ(broken[0].path, folder / "broken.py");
  EXPECT_EQ(broken[0].reason, "line 1: it is broken");
}

TEST(Discovery, RefusesWhatIsNoDirectory) {
  const Folder folder;
  folder.write("a.py", "");
  FakeFeatures features;
  EXPECT_THROW(discover({folder / "missing"}, features), Error);
  EXPECT_THROW(discover({folder / "a.py"}, features), Error);
}

TEST(RegistryTest, TheFirstOfANameStays) {
  Engine engine;
  const auto id = engine.add(feature("A"));
  ASSERT_TRUE(id);
  EXPECT_FALSE(engine.add(feature("A")));
  engine.remove(*id);
  const auto again = engine.add(feature("A"));
  ASSERT_TRUE(again);
  EXPECT_NE(*again, *id) << "handles are not used twice";
}

TEST(RegistryTest, FindsByNameAndAlias) {
  Registry registry;
  Feature a = feature("A");
  a.rule.aliases = {"Old", "B"};
  ASSERT_TRUE(registry.add(a));
  ASSERT_TRUE(registry.add(feature("B")));
  EXPECT_EQ(registry.find("ns", "Old")->rule.name, "A");
  EXPECT_EQ(registry.find("ns", "B")->rule.name, "B") << "a name goes before an alias";
  EXPECT_EQ(registry.find("ns", "C"), nullptr);
  EXPECT_EQ(registry.find("other", "A"), nullptr);
  EXPECT_TRUE(registry.has_api("ns", "inspect_tensor"));
  EXPECT_FALSE(registry.has_api("ns", "unknown"));
}

}  // namespace
}  // namespace te::inspect
