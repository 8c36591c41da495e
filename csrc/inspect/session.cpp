#include "inspect/session.h"

#include "core/error.h"
#include "inspect/unmatched.h"

namespace te::inspect {

namespace {

constexpr std::string_view kEnabled = "_enabled";

}  // namespace

Session::Session(uint64_t epoch, Config config, Registry registry, Callouts callouts,
                 LogOptions log, Clock clock)
    : epoch_(epoch),
      config_(std::move(config)),
      registry_(std::move(registry)),
      callouts_(std::move(callouts)),
      router_(config_, registry_, callouts_.regex, *callouts_.features),
      logs_(std::move(log), std::move(clock)) {}

std::shared_ptr<const Decision> Session::decide(const Target& target, int64_t iteration) {
  return decisions_.decide(target, router_.route(target), iteration, *callouts_.features);
}

std::vector<const RoutedUse*> Session::active(const Target& target, int64_t iteration) {
  const Route route = router_.route(target);
  std::vector<const RoutedUse*> result;
  Target question = target;
  question.api += kEnabled;
  if (!registry_.has_api(target.ns, question.api)) {
    for (const RoutedUse& use : *route) result.push_back(&use);
    return result;
  }
  const auto decision = decide(question, iteration);
  for (const RoutedUse& use : *route) {
    for (size_t i = 0; i < decision->said.size(); ++i) {
      const RoutedUse& asked = (*decision->route)[i];
      if (decision->said[i] && asked.feature == use.feature && asked.section == use.section)
        result.push_back(&use);
    }
  }
  if (target.api == "modify_tensor" && result.size() > 1) {
    fail(Kind::Runtime, target.api, "expected one feature that modifies the tensor, got ",
         result[0]->feature->rule.name, " of section ", result[0]->section, " and ",
         result[1]->feature->rule.name, " of section ", result[1]->section, " (", describe(target),
         ", iteration ", iteration, ")");
  }
  return result;
}

void Session::log_message(int level, const std::string& text, const std::string& layer,
                          const std::optional<std::string>& once) {
  if (once && !once_.first(*once)) return;
  if (const auto line = logs_.message(level, layer.empty() ? text : one_line(layer) + ": " + text))
    callouts_.sink->print(*line);
}

void Session::settle() {
  flush();
  if (!settled_.exchange(true)) report_unmatched();
}

void Session::flush() {
  if (const auto failure = logs_.flush()) callouts_.sink->warn(*failure);
}

void Session::finish() {
  flush();
  if (const auto lost = logs_.finish()) callouts_.sink->warn(*lost);
}

void Session::report_unmatched() {
  const std::vector<std::string> layers = router_.layers();
  for (const Section* section : router_.unmatched()) {
    const std::string text = explain_unmatched(*section, layers);
    logs_.message(level::kWarning, text);  // not printed: the terminal shows the warning below
    callouts_.sink->warn(text);
  }
}

}  // namespace te::inspect
