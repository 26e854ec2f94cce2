from vllm_ext.simulation import recording
from vllm_ext.simulation.cost.constant import Constant
from vllm_ext.simulation.validation import fit, validate, predict
from vllm_ext.simulation.recorded_steps import timed_steps
from .recorded_runs import simulate
def test_x(tmp_path, monkeypatch):
    for system in ("upstream-fcfs","fcfs","alise"):
        p=tmp_path/f"{system}f.jsonl"; q=tmp_path/f"{system}v.jsonl"
        recording.start(p); recording.start(q)
        simulate(p, monkeypatch, Constant(step_s=0.01), system=system, seed=1000)
        simulate(q, monkeypatch, Constant(step_s=0.01), system=system, seed=0)
        f=fit(recording.read(p)); run=recording.read(q)[0]
        v=validate(run,f)
        print(system, f.offsets, f.cost.curve, {k:round(x,3) for k,x in v.metrics.items() if 'error_median' in k or 'jacc' in k or 'order' in k})
        a,b=v.measured.batches,v.predicted.batches
        for i,(x,y) in enumerate(zip(a,b)):
            if x.req_ids!=y.req_ids or abs(x.start_s-y.start_s-(a[0].start_s-b[0].start_s))>1e-3:
                print(i,x,y); print(a[i-1], b[i-1]); break
        print(len(a),len(b), a[0],b[0])
