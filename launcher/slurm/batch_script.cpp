#include "launcher/slurm/batch_script.h"

#include <fmt/format.h>

#include <regex>

#include "cluster/base/error.h"
#include "configs/loader/message_text.h"
#include "launcher/processes/restarts.h"

namespace birkhoff {
namespace {

namespace fs = std::filesystem;

// sbatch passes on the variables of the job and step in which it is called, and programs would take
// them for this job's. A job that is no array has no SLURM_ARRAY_*.
constexpr const char* kForgetCaller = R"SH(
for name in "${{!SLURM_STEP@}}" "${{!SLURM_SRUN_@}}" "${{!SLURM_CPU_BIND@}}" "${{!SLURM_MEM_@}}" \
  "${{!PMI_@}}" "${{!PMIX_@}}"{}; do
  [[ $name == PMIX_MCA_* ]] || unset "$name"
done
)SH";

// The start of every script. end: says in one line how the job ended, and records it; ask: passes a
// request on.
constexpr const char* kFunctions = R"SH(
# One element of an array also has the id of the whole array.
job=$SLURM_JOB_ID
[ -z "${SLURM_ARRAY_TASK_ID-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
say() { echo "birkhoff: $(date '+%F %T'): job $job: $1"; }
end() { say "$2"; echo "$1 $2" >"$output/$job.end"; exit "$1"; }
newest() { local saved=("$run"/checkpoints/step-*); echo "${saved[-1]}"; }

# USR1 comes before the time limit; TERM at the limit, if the job is preempted, and by scancel; USR2
# by `birkhoff cancel`. Each is a request to save, passed on until it is heard.
child='' asked='' limit_near='' cancelled=''
ask() { asked=1; [ -z "$child" ] || kill -USR1 "$child" 2>/dev/null; }
birkhoff() { # COMMAND...
  (trap '' USR1; exec "$program" "$@") &
  child=$!
  while kill -0 "$child" 2>/dev/null; do
    if [ -z "$asked" ]; then wait "$child"; else ask; sleep 1; fi
  done
  wait "$child"
  code=$? child=''
}
trap 'limit_near=1; ask' USR1
trap 'cancelled=1; ask' USR2
trap ask TERM

)SH";

// Slurm keeps a job that has lost the node of its script, because of --no-kill.
constexpr const char* kGuard = R"SH(
# If this node is lost, either of two other nodes requeues the job, unless Slurm has done
# so, or the job has ended.
guard() { # NODE
  while :; do
    srun --job-name=birkhoff-guard --overlap --export=ALL --nodes=1 --ntasks=1 --nodelist="$1" \
      --mpi=none bash -c '
      while sleep 30; do
        read -r restarts nodes < <(squeue --noheader --jobs="$0" --states=RUNNING \
          --Format=RestartCnt:9,NodeList:100000)
        [ "$restarts" = "${SLURM_RESTART_COUNT:-0}" ] || continue
        scontrol show hostnames "$nodes" | grep -Fqx "$1" || scontrol requeue Incomplete "$0"
      done' "$job" "$SLURMD_NODENAME"
    sleep 10 # it ended with its node
  done
}
guards=()
for node in $(scontrol show hostnames | grep -Fvx "$SLURMD_NODENAME" | head -n 2); do
  guard "$node" </dev/null >/dev/null 2>&1 &
  guards+=($!)
done
trap 'kill "${guards[@]}" 2>/dev/null' EXIT
)SH";

// The rest of every script.
constexpr const char* kBody = R"SH(
cd -- "$work_folder" || end 2 "the folder that it was submitted in is missing on $HOSTNAME"
[ -x "$program" ] || end 2 "birkhoff is missing on $HOSTNAME: $program"

rm -f "$output/$job.end" # of its last start
before=$(newest)
code=0
[ -z "${examine[*]}" ] || birkhoff doctor "$config" --run "$run" "${examine[@]}"
[ $code != 0 ] || birkhoff train "$config" --run "$run" "${options[@]}"

case $code in
  0) end 0 "the run is finished" ;;
  75 | 138) ;; # saved; 138: asked before it could listen
  *) end "$code" "failed with exit code $code (Birkhoff's docs/runbook.md)" ;;
esac
[ -z "$cancelled" ] || end 75 "saved; canceled"
# A job that Slurm no longer calls running has reached its time limit, was canceled, or goes back
# to the queue by itself.
read -r state reason < <(squeue --noheader --jobs="$job" --format='%T %r')
[ "$reason" != TimeLimit ] || limit_near=1
# A job that saves nothing must not be requeued forever. If it was preempted, it is not to blame.
starts=$output/$job.fruitless
if [ "$(newest)" != "$before" ]; then
  rm -f "$starts"
elif [ -n "$limit_near" ]; then
  end 75 "nothing new was saved before the time limit, so it ends: submit it with a longer one"
elif [ -z "$asked" ]; then
  date >>"$starts"
  [ "$(wc -l <"$starts")" -lt 5 ] || end 75 "saved nothing new in 5 starts, so it ends"
fi
if [ -n "$state" ] && [ "$state" != RUNNING ] && [ "$reason" != TimeLimit ]; then
  end 75 "saved; ended by Slurm ($state)"
fi
)SH";

// A job of a chain gets the previous job's id as its argument. The codes are of errors that would
// recur.
constexpr const char* kChain = R"SH(
follows=$output/${{1-}}${{SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}}.end
if [ -n "${{1-}}" ] && [ -f "$follows" ]; then
  read -r code _ <"$follows"
  case $code in
    {}) end "$code" "job $1, which it follows, failed with exit code $code, as this one would" ;;
  esac
fi
)SH";

constexpr const char* kRequeueEnd = R"SH(say "saved; goes back to the queue"
scontrol requeue "$job" || end 75 "saved, but cannot go back to the queue: submit it again"
exit 75
)SH";

constexpr const char* kStayEnd = R"SH(end 75 "saved; submit it again to continue"
)SH";

// An option of sbatch must fit its buffer of 8 KiB, quoted.
constexpr std::size_t kMaxOptionBytes = 4000;

// "#SBATCH --name=value". sbatch takes text in double quotes literally, except a backslash, which
// protects the next character. It cannot take a line end, nor two words that it once read as
// options.
std::string sbatch_line(const char* name, const std::string& value) {
  static const std::regex kPlain("[A-Za-z0-9_./:,@%+=-]*"), kControl("[\\x01-\\x1f\\x7f]"),
      kEaten("packjob|hetjob", std::regex::icase);
  if (value.size() > kMaxOptionBytes) {
    fail(ExitCode::kUsage, "--{} of sbatch is too long ({} bytes): shorten {}", name, value.size(),
         quoted(value));
  }
  std::smatch found;
  if (std::regex_search(value, kControl)) {
    fail(ExitCode::kUsage, "--{} of sbatch cannot hold the control character in {}: rename it",
         name, quoted(value));
  }
  if (std::regex_search(value, found, kEaten)) {
    fail(ExitCode::kUsage, "--{} of sbatch cannot hold the word '{}' of {}: rename it", name,
         found.str(), quoted(value));
  }
  std::string text;
  for (const char c : value)
    text += c == '"' || c == '\\' ? fmt::format("\\{}", c) : std::string(1, c);
  if (!std::regex_match(value, kPlain)) text = '"' + text + '"';
  return fmt::format("#SBATCH --{}={}\n", name, text);
}

// A file name pattern of Slurm. Slurm replaces no %j in a name with a backslash.
std::string output_pattern(const fs::path& folder, bool array) {
  std::string pattern;
  for (const char c : folder.string()) {
    if (c == '\\') {
      fail(ExitCode::kUsage,
           "{}: Slurm cannot write its output to a folder with a backslash in its name: rename it",
           folder.string());
    }
    pattern += c == '%' ? "%%" : std::string(1, c);
  }
  return job_output(pattern, array ? "%A_%a" : "%j").string();
}

std::string options_of_sbatch(const BatchJob& job, const configs::Site& site) {
  std::string text;
  const auto line = [&text](const char* name, const std::string& value) {
    if (!value.empty()) text += sbatch_line(name, value);
  };
  const auto flag = [&text](const char* name) { text += fmt::format("#SBATCH --{}\n", name); };
  line("job-name", job.name);
  line("output", output_pattern(job.output_folder, job.runs.size() > 1));
  line("open-mode", "append");
  if (job.runs.size() > 1) line("array", fmt::format("0-{}", job.runs.size() - 1));
  line("partition", site.partition());
  line("account", site.account());
  line("qos", site.qos());
  line("constraint", site.constraint());
  line("exclude", fmt::format("{}", fmt::join(site.exclude(), ",")));
  line("nodes", std::to_string(job.nodes));
  line("ntasks-per-node", std::to_string(site.ranks_per_node()));
  if (site.cpus_per_rank() > 0) line("cpus-per-task", std::to_string(site.cpus_per_rank()));
  if (site.gpus_per_node() > 0) line("gpus-per-node", std::to_string(site.gpus_per_node()));
  line("time", job.time);
  if (site.signal_seconds() > 0) line("signal", fmt::format("B:USR1@{}", site.signal_seconds()));
  flag("no-kill");
  flag(site.requeue() ? "requeue" : "no-requeue");
  for (const std::string& option : site.sbatch()) text += "#SBATCH " + option + '\n';
  return text;
}

// name=(a b c), in lines.
template <typename Texts>
std::string array_of(const char* name, const Texts& texts) {
  std::string text = fmt::format("{}=(", name);
  for (const std::string& value : texts) text += "\n  " + shell_quoted(value);
  return text + ")\n";
}

std::string settings_of(const BatchJob& job) {
  if (job.runs.size() == 1) {
    return fmt::format("config={}\nrun={}\n", shell_quoted(job.runs[0].config.string()),
                       shell_quoted(job.runs[0].folder.string()));
  }
  std::vector<std::string> configs, runs;
  for (const BatchJob::Run& run : job.runs) {
    configs.push_back(run.config.string());
    runs.push_back(run.folder.string());
  }
  return array_of("configs", configs) + array_of("runs", runs) +
         "config=${configs[$SLURM_ARRAY_TASK_ID]} run=${runs[$SLURM_ARRAY_TASK_ID]}\n";
}

// As a pattern of bash.
std::string codes_that_come_again() {
  std::vector<int> codes;
  for (int code = 1; code <= static_cast<int>(ExitCode::kMemory); ++code) {
    if (!Restarts::may_pass(code)) codes.push_back(code);
  }
  return fmt::format("{}", fmt::join(codes, " | "));
}

std::string environment_of(const configs::Site& site) {
  std::string text;
  if (site.cpus_per_rank() > 0) {
    text +=
        fmt::format("export OMP_NUM_THREADS={0} SRUN_CPUS_PER_TASK={0}\n", site.cpus_per_rank());
  }
  for (const std::string& variable : site.environment()) {
    const std::size_t equals = variable.find('=');
    text += fmt::format("export {}={}\n", variable.substr(0, equals),
                        shell_quoted(variable.substr(equals + 1)));
  }
  for (const std::string& module : site.modules()) {
    text += fmt::format("module load {0} || end 2 {0}': this module does not load'\n",
                        shell_quoted(module));
  }
  return text;
}

}  // namespace

std::string batch_script(const BatchJob& job, const configs::Site& site) {
  std::string text =
      "#!/bin/bash\n" + options_of_sbatch(job, site) +
      "\n# Written by `birkhoff submit`, and explained in Birkhoff's docs/slurm.md.\n"
      "# shellcheck disable=SC2016 # names are literal, whatever they hold\n";
  text +=
      fmt::format("program={}\nwork_folder={}\noutput={}\n", shell_quoted(job.program.string()),
                  shell_quoted(job.work_folder.string()), shell_quoted(job.output_folder.string()));
  text += settings_of(job) + array_of("options", job.train_options) +
          array_of("examine", job.doctor_options);
  const bool is_array = job.runs.size() > 1;
  text += fmt::format(kForgetCaller, is_array ? "" : " \"${!SLURM_ARRAY_@}\"");
  text += kFunctions + fmt::format(kChain, codes_that_come_again()) + environment_of(site);
  if (site.requeue() && job.nodes > 1) text += kGuard;
  return text + kBody + (site.requeue() ? kRequeueEnd : kStayEnd);
}

fs::path job_output(const fs::path& folder, const std::string& job) {
  return folder / (job + ".out");
}

fs::path job_end(const fs::path& folder, const std::string& job) { return folder / (job + ".end"); }

std::string shell_quoted(const std::string& text) {
  std::string word = "'";
  for (const char c : text) word += c == '\'' ? "'\\''" : std::string(1, c);
  return word + "'";
}

}  // namespace birkhoff
